"""Intervals of mean gains by Student's t: its quantiles against printed tables, and the coverage of few groups."""

import numpy as np
import pytest
import torch

from attune.common.metrics import RIVALS
from attune.common.statistics import pairs_of, student
from attune.fedclient.work.comparison import compared

TRUTH = 5.0  # far from 0, to which an interval is widened where the test cannot exclude it


@pytest.mark.parametrize(
    ("freedom", "printed"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262), (10, 2.228), (30, 2.042), (120, 1.980)],
)
def test_quantiles_are_those_of_printed_tables(freedom: int, printed: float) -> None:
    assert student(freedom) == pytest.approx(printed, abs=6e-4)


def gains(rng: np.random.Generator, groups: int, samples: int) -> tuple[torch.Tensor, np.ndarray]:
    """Return gains with mean TRUTH, one for each sample, and the places of the groups; samples of one group are alike."""
    by_group = TRUTH + rng.normal(size=groups).repeat(samples) + 0.3 * rng.normal(size=groups * samples)
    return torch.from_numpy(by_group), np.arange(groups).repeat(samples)


@pytest.mark.parametrize(("groups", "samples"), [(6, 5), (6, 1), (10, 2)])
def test_the_interval_of_few_groups_covers_the_truth_as_often_as_it_says(groups: int, samples: int) -> None:
    """Draw 3000 devices; three standard errors of a share of 0.05 are 0.012. With 1.96, six groups cover 89 %."""
    rng, missed = np.random.default_rng(3), 0
    for _ in range(3000):
        gain, places = gains(rng, groups, samples)
        numbers = compared(gain, torch.zeros_like(gain), RIVALS["local"], places if samples > 1 else None)
        [pair] = pairs_of(numbers | {"test_samples": len(gain)})
        low, high = pair.interval()
        missed += not low <= TRUTH <= high
    assert abs(missed / 3000 - 0.05) <= 0.012, missed / 3000


def test_one_group_says_nothing() -> None:
    gain = torch.full((8,), 0.25, dtype=torch.float64)
    numbers = compared(gain, torch.zeros_like(gain), RIVALS["local"], np.zeros(8, dtype=np.intp))
    [pair] = pairs_of(numbers | {"test_samples": 8})
    assert pair.interval() == (-1.0, 1.0)


def test_a_report_without_the_number_of_groups_is_read_as_before() -> None:
    """Devices of version 0.1 do not report how many groups they have."""
    said = {"test_samples": 40, "better_than_local": 12, "worse_than_local": 3, "gain_local": 0.2, "error_local": 0.05}
    [pair] = pairs_of(said | {"p_local": 0.01})
    low, high = pair.interval()
    assert (low, high) == pytest.approx((0.2 - student(39) * 0.05, 0.2 + student(39) * 0.05))
