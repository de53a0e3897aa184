"""Round of FedTP at the published size, in small."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import gpu

SMALL = ("model.preset=small", "train.local_epochs=1")


def test_the_seconds_are_those_of_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the clock stand but for simulations, of which each takes 3 s and 2 s a round."""
    now_s, rounds = [0.0], []
    simulated = gpu.simulate

    def slow(*args: Any, **options: Any) -> Any:
        rounds.append(options["rounds"])
        now_s[0] += 3 + 2 * options["rounds"]
        return simulated(*args, **options)

    monkeypatch.setattr(gpu, "simulate", slow)
    monkeypatch.setattr(gpu.time, "perf_counter", lambda: now_s[0])
    assert gpu.published_round("cpu", 40, 3, SMALL) == 2 and rounds == [1, 4]


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    gpu.main([], standalone_mode=False)
    assert "no GPU" in capsys.readouterr().out
