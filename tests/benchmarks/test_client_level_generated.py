"""The private gradient of the experiment with generated parts: norms of single devices from one backward pass."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.client_level_generated import Hypernetwork, Options


@pytest.mark.parametrize("clip", [0.05, math.inf])
def test_norms_and_clipped_sums_are_those_of_autograd_for_each_device(clip: float) -> None:
    draw = torch.Generator().manual_seed(0)
    initial = {"q": torch.randn(3, 4, generator=draw), "v": torch.randn(5, generator=draw)}
    hyper = Hypernetwork(initial, Options("fedtp", hidden=6, embedding=4))
    flat = [tensor.requires_grad_() for layer in hyper.layers for tensor in layer]
    z_SE, change_SR = hyper.z_NE[:7].clone().requires_grad_(), torch.randn(7, 17, generator=draw)
    with torch.no_grad():
        sums, dz_SE, norm_S = hyper.gradients(z_SE, change_SR, clip)
    expected, slopes = [torch.zeros_like(tensor) for tensor in flat], []
    for k in range(7):
        generated = torch.cat([tensor.reshape(-1) for tensor in hyper.weights(z_SE[k : k + 1]).values()])
        *gradients, dz = torch.autograd.grad(generated @ -change_SR[k], [*flat, z_SE])
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
        assert float(norm_S[k]) == pytest.approx(norm, rel=1e-5)
        for total, gradient in zip(expected, gradients, strict=True):
            total += gradient * min(1.0, clip / norm)
        slopes.append(dz[k])
    for made, total in zip([tensor for layer in sums for tensor in layer], expected, strict=True):
        torch.testing.assert_close(made, total, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(dz_SE, torch.stack(slopes), atol=1e-5, rtol=1e-4)
