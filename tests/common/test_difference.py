"""The interval of a paired difference for all small tables, against a direct computation of its definition."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from attune.common.statistics import LEVEL, Z, difference

LARGEST = 16  # samples of the largest table
HALVINGS = 55  # of an interval of length 2
GOLDEN = (math.sqrt(5) - 1) / 2

Numbers = npt.NDArray[np.float64]


def tables() -> list[tuple[int, int, int]]:
    """Return all (won, lost, n) with 1 to LARGEST samples."""
    sizes = range(1, LARGEST + 1)
    return [(won, lost, n) for n in sizes for won in range(n + 1) for lost in range(n + 1 - won)]


def log_likelihood(won: Numbers, lost: Numbers, n: Numbers, delta: Numbers, share_lost: Numbers) -> Numbers:
    """Return the log-likelihood of tables if the lost share is `share_lost` and the won share exceeds it by `delta`."""
    counts_and_shares = ((won, share_lost + delta), (lost, share_lost), (n - won - lost, 1 - 2 * share_lost - delta))
    total = np.zeros_like(delta)
    for count, share in counts_and_shares:
        with np.errstate(divide="ignore", invalid="ignore"):
            total += np.where(count > 0, count * np.log(np.maximum(share, 0.0)), 0.0)
    return total


def statistic(won: Numbers, lost: Numbers, n: Numbers, delta: Numbers) -> Numbers:
    """Return Tango's statistic. The likeliest lost share is found by golden-section search, without a formula for it."""
    low, high = np.maximum(0.0, -delta), (1 - delta) / 2
    for _ in range(90):
        left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        worse = log_likelihood(won, lost, n, delta, left) < log_likelihood(won, lost, n, delta, right)
        low, high = np.where(worse, left, low), np.where(worse, high, right)
    share_lost = (low + high) / 2
    spread = np.sqrt(n * np.maximum(2 * share_lost + delta * (1 - delta), 1e-300))
    return np.asarray((won - lost - n * delta) / spread)


def end(won: Numbers, lost: Numbers, n: Numbers, upper: bool) -> Numbers:
    """Return an end of the score interval: where the statistic, which falls, is -Z or Z on that side of the observed value."""
    observed = (won - lost) / n
    inside, outside = observed, np.full_like(observed, 1.0 if upper else -1.0)
    for _ in range(HALVINGS):
        middle = (inside + outside) / 2
        within = np.abs(statistic(won, lost, n, middle)) <= Z
        inside, outside = np.where(within, middle, inside), np.where(within, outside, middle)
    return inside


def excluded(won: int, lost: int) -> bool:
    """Return whether the exact sign test excludes 0, computed with whole numbers."""
    tail = sum(math.comb(won + lost, k) for k in range(min(won, lost) + 1))
    return Fraction(2 * tail, 2 ** (won + lost)) <= Fraction(1 - LEVEL).limit_denominator(1000)


def test_both_ends_are_those_of_a_direct_computation() -> None:
    """Compare all 968 small tables. The ends are widened to 0 where the exact test does not exclude it."""
    counts: Any = np.array(tables(), dtype=np.float64).T
    direct = [end(*counts, upper) for upper in (False, True)]
    wrong = []
    for (won, lost, n), low, high in zip(tables(), *direct, strict=True):
        expected = (low, high) if excluded(won, lost) else (min(low, 0.0), max(high, 0.0))
        if difference(won, lost, n) != pytest.approx(expected, abs=1e-6):
            wrong.append((won, lost, n, difference(won, lost, n), expected))
    assert not wrong, wrong[:5]


def test_the_interval_of_two_models_that_change_places_is_mirrored() -> None:
    for won, lost, n in [*tables(), (0, 0, 28), (0, 0, 5000), (250, 250, 1000), (3, 1, 4000)]:
        low, high = difference(won, lost, n)
        assert difference(lost, won, n) == pytest.approx((-high, -low), abs=1e-9), (won, lost, n)


@pytest.mark.parametrize("n", [1, 2, 28, 500, 100_000])
def test_without_any_difference_harm_is_as_possible_as_gain(n: int) -> None:
    """Compute by hand: with no discordant sample the statistic is sqrt(n d / (1 - d)), so d = Z^2 / (n + Z^2)."""
    assert difference(0, 0, n) == pytest.approx((-(Z**2) / (n + Z**2), Z**2 / (n + Z**2)), abs=1e-9)
