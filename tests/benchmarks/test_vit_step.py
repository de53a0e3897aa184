"""The ways to compute a training step compute the same step; otherwise their times could not be compared."""

from __future__ import annotations

import pytest
import torch

from benchmarks import vit_step


@pytest.mark.parametrize(("way", "within"), [("fused", 1e-5), ("bfloat16", 0.05)])
def test_each_way_takes_the_same_step(way, within):
    ways = vit_step.steps(batch=4)
    expected, found = ([float(ways[name]()) for _ in range(3)] for name in (vit_step.OWN, way))
    assert expected[2] < expected[0]
    assert found == pytest.approx(expected, rel=within)


def test_torchs_kernel_is_what_the_fused_way_calls(monkeypatch):
    called = []

    def kernel(q, k, v, is_causal):
        called.append(is_causal)
        return torch.zeros_like(v)

    monkeypatch.setattr(vit_step, "scaled_dot_product_attention", kernel)
    ways = vit_step.steps(batch=2)
    ways[vit_step.OWN]()
    assert called == []
    ways["fused"]()
    assert called == [False] * vit_step.OPTIONS["depth"]
