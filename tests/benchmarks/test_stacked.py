"""The benchmark of stacked training: every way trains the same devices, and all cases can be stacked."""

from __future__ import annotations

import pytest
import torch

import benchmarks.stacked
from attune.fedclient.work.job import alone
from attune.fedclient.work.stacked.lockstep import Stacked
from benchmarks.stacked import CASES, Device, measure


@pytest.mark.parametrize("name", CASES)
def test_both_ways_come_to_the_same(name, monkeypatch):
    monkeypatch.setattr(benchmarks.stacked, "STEPS", 5)
    made, stacked = [Device(CASES[name], number) for number in range(2)], Stacked()
    for each, found in zip(made, stacked.run([each.training() for each in made]), strict=True):
        torch.testing.assert_close(found.tensors, alone(each.training()).tensors, rtol=1e-3, atol=1e-4)
    assert stacked.reasons == []


def test_a_case_has_its_figures():
    found = measure(CASES["MLR 60 x 10"], devices=3, repeats=1)
    assert found["weights"] == 610 and found["devices"] == 3
    assert found["train_times_faster"] == pytest.approx(found["train_one_by_one_s"] / found["train_stacked_s"], rel=0.1)
