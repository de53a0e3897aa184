"""Costs of privacy and of mixing beside the plain work, in small: each ratio is the one of its two figures."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from benchmarks import mcsa, private_step, secure_round


def test_a_private_step_is_compared_with_a_plain_one(monkeypatch):
    monkeypatch.setattr(private_step, "STEPS", 2)
    monkeypatch.setattr(private_step, "SAMPLES", 96)
    found = private_step.measure(private_step.CASES["MLR 64 x 10"], repeats=1)
    assert found["values"] == 64 * 10 + 10
    for way in ("clipped", "private"):
        assert found[f"{way}_ratio"] == pytest.approx(found[f"{way}_ms"] / found["plain_ms"], rel=0.05)


def test_the_ways_differ_by_clipping_and_noise(monkeypatch):
    monkeypatch.setattr(private_step, "STEPS", 3)
    monkeypatch.setattr(private_step, "SAMPLES", 96)
    tasks = private_step.ways(private_step.CASES["MLR 64 x 10"])
    trained = {name: private_step.Sgd(private_step.SgdSettings()).run(task).tensors for name, task in tasks.items()}
    again = private_step.Sgd(private_step.SgdSettings()).run(tasks["clipped"]).tensors
    moved = {
        name: float(sum((tensors[key] - tasks[name].start[key]).square().sum() for key in tensors)) ** 0.5
        for name, tensors in trained.items()
    }
    assert all(torch.equal(again[name], trained["clipped"][name]) for name in again)
    assert 0 < moved["clipped"] < moved["private"]  # noise moves weights further than clipped gradients do


def test_a_secure_round_is_compared_with_a_plain_one(monkeypatch, tmp_path):
    monkeypatch.setattr(secure_round, "ROUNDS", 2)
    cpu_s = {(1, False): 1.0, (3, False): 2.0, (1, True): 2.0, (3, True): 5.0}
    given = lambda devices, rounds, settings: cpu_s[rounds, bool(settings)]  # noqa: E731
    monkeypatch.setattr(secure_round, "cpu_s", given)
    said = CliRunner().invoke(
        secure_round.main, ["--repeats", "1", "--out", str(tmp_path / "out.json")], catch_exceptions=False
    )
    assert said.exit_code == 0, said.output
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["processor_s"] == {"plain": 0.5, "secure": 1.5} and found["ratio"] == 3.0


def test_both_kinds_of_round_run(monkeypatch):
    for name, value in {"DEVICES": 5, "FEATURES": 3}.items():
        monkeypatch.setattr(secure_round, name, value)
    devices = secure_round.shards()
    assert [secure_round.cpu_s(devices, 1, given) > 0 for given in secure_round.WAYS.values()] == [True, True]


def test_the_share_of_the_roof_is_that_of_the_smaller_limit(monkeypatch):
    monkeypatch.setattr(mcsa, "SQUARE", 64)
    monkeypatch.setattr(mcsa, "COPY", 1 << 12)
    monkeypatch.setattr(mcsa, "cpu_s", lambda work: (work(), 0.001)[1])  # every work takes 1 ms
    found = mcsa.measure(S=4, D=100, repeats=1)
    arithmetic, memory = 4 * 4 * 4 * 100 / (2 * 64**3 / 0.001), 12 * 4 * 100 / (8 * 4096 / 0.001)
    assert found["smaller_roof"] == ("arithmetic" if arithmetic > memory else "memory")
    assert found["share_of_roof"] == pytest.approx(max(arithmetic, memory) / 0.001, abs=0.001)
    assert found["round_beyond_mixing_by_bytes"] == 0.0


def test_the_obvious_mixing_is_the_servers():
    X_SD = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    expected = mcsa.naive(X_SD, 5.0)
    mcsa.mcsa_(X_SD, 5.0)
    torch.testing.assert_close(X_SD, expected, rtol=1e-5, atol=1e-6)
