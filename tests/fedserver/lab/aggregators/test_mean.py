"""The weighted mean against numbers worked out by hand and against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attune.common.exchange.transform import PartUpdate
from attune.common.methods.settings.aggregators import MeanSettings
from attune.fedserver.lab.aggregators.base import MemoryVault
from attune.fedserver.lab.aggregators.mean import Mean, weighted_mean


def mean_of(values: dict[str, torch.Tensor], samples: dict[str, int], uniform: bool = False) -> torch.Tensor:
    vault = MemoryVault()
    aggregator = Mean(MeanSettings(uniform=uniform), vault, 0, {"x": ["x"]})
    aggregator.start({"x": torch.zeros_like(next(iter(values.values())))})
    aggregator.close_round([PartUpdate(client, samples[client], {"x": value}) for client, value in values.items()])
    return vault.read("value")["x"]


def test_by_hand():
    """Expect (1*1 + 3*5) / 4 = 4 and (1*2 + 3*(-2)) / 4 = -1; with uniform weights 3 and 0."""
    values = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([5.0, -2.0])}
    assert mean_of(values, {"a": 1, "b": 3}).tolist() == [4.0, -1.0]
    assert mean_of(values, {"a": 1, "b": 3}, uniform=True).tolist() == [3.0, 0.0]


def test_uniform_leaves_out_clients_of_no_samples():
    values = {"a": torch.tensor([1.0]), "b": torch.tensor([5.0])}
    assert mean_of(values, {"a": 1, "b": 0}, uniform=True).tolist() == [1.0]


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        (torch.int64, (10, 20), 18),  # (10 + 3 * 20) / 4 = 17.5, to even
        (torch.bool, (False, True), True),
        (torch.bfloat16, (1.0, 2.0), 1.75),
        (torch.float64, (1.0, 2.0), 1.75),
    ],
)
def test_every_dtype_keeps_its_own(dtype, values, expected):
    a, b = (torch.tensor(value, dtype=dtype) for value in values)
    result = mean_of({"a": a, "b": b}, {"a": 1, "b": 3})
    assert result.dtype == dtype and result.item() == expected


def test_large_counters_stay_exact():
    count = torch.tensor(2**40 + 1)
    assert mean_of({"a": count, "b": count}, {"a": 1, "b": 1}).item() == 2**40 + 1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=100), st.integers(0, 2**31))
def test_float32_sums_are_within_1e_6_of_float64(samples, seed):
    """Compare relative to the largest value in the sum, because the sum itself may cancel."""
    X_SD = torch.randn(len(samples), 257, generator=torch.Generator().manual_seed(seed))
    shares_S = torch.tensor(samples, dtype=torch.float64) / sum(samples)
    updates = [PartUpdate(str(i), 1, {"x": row}) for i, row in enumerate(X_SD)]
    result = weighted_mean("x", updates, shares_S.tolist())
    assert result.dtype == torch.float32
    assert (result.double() - shares_S @ X_SD.double()).abs().max() <= 1e-6 * X_SD.abs().max()


def test_updates_are_read_one_at_a_time_and_once_a_round():
    """Use lazy updates: a tensor that was summed is released before the next one is read."""

    class Lazy(dict):
        reads = 0

        def __getitem__(self, name: str) -> torch.Tensor:
            Lazy.reads += 1
            return super().__getitem__(name)

    updates = [PartUpdate(str(i), 1, Lazy(x=torch.full((3,), float(i)))) for i in range(4)]
    assert weighted_mean("x", updates, [0.25] * 4).tolist() == [1.5] * 3
    assert Lazy.reads == 4
