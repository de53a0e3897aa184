"""Harmed devices of a comparison: what they keep is worse than what `local` or `fedavg` leave them, by the paired test."""

from __future__ import annotations

import numpy as np
import torch

from attune.simulation.comparison_table import harmed


def right(*bits: int) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.bool)


def test_a_device_is_harmed_only_beyond_chance() -> None:
    good, bad = right(*[1] * 20), right(*[1] * 10, *[0] * 10)
    assert harmed(bad, {"local": good}) is True
    assert harmed(good, {"local": bad}) is False
    assert harmed(right(*[1] * 17, 0, 0, 0), {"local": good}) is False, "three of twenty may be chance"
    assert harmed(good, {}) is None


def test_two_rivals_need_more_than_one() -> None:
    """Compute by hand: six losses of six have p = 2 / 64, and twice that is above 5 %."""
    mine, rival = right(*[0] * 6, *[1] * 20), right(*[1] * 26)
    assert harmed(mine, {"local": rival}) is True
    assert harmed(mine, {"local": rival, "common": mine}) is False


def test_a_group_of_samples_counts_once() -> None:
    mine, rival = right(*[0] * 10, *[1] * 10), right(*[1] * 20)
    assert harmed(mine, {"local": rival}) is True
    assert harmed(mine, {"local": rival}, np.repeat(np.arange(4), 5)) is False


def test_numbers_are_compared_by_their_scores() -> None:
    mine, rival = torch.linspace(-3, -2, 30, dtype=torch.float64), torch.zeros(30, dtype=torch.float64)
    assert harmed(mine, {"common": rival}) is True
    assert harmed(rival, {"common": mine}) is False
