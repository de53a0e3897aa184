"""Slots of a device's statistics, against sums of fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attune.common.secure.masked_sums import MaskedLayout, packed
from attune.common.site_statistics import BUCKETS, Centre
from attune.fedclient.data.lazy_shard import shard_of
from attune.fedclient.data.masked_slots import exact_sum, slots_of, sum_of_squares
from attune.fedclient.read_options import ReadOptions

LISTS = st.lists(st.floats(-1e12, 1e12, allow_subnormal=False), min_size=1, max_size=30)


@given(LISTS)
def test_sums_have_twice_the_precision_of_a_float(values: list[float]) -> None:
    array = np.array(values)
    true, squares = sum(map(Fraction, values)), sum(Fraction(value) ** 2 for value in values)
    assert abs(exact_sum(array) - true) <= abs(true) / 2**100
    assert abs(sum_of_squares(array) - squares) <= squares / 2**90 + Fraction(1, 2**300)


def test_sums_of_whole_numbers_are_exact() -> None:
    values = np.array([2.0**53 - 1, 2.0**53 - 1, 3.0, -(2.0**40)])
    assert exact_sum(values) == 2 * (2**53 - 1) + 3 - 2**40
    assert sum_of_squares(np.array([2.0**26 - 1] * 5)) == 5 * (2**26 - 1) ** 2


def test_sums_that_overflow_are_infinite_and_so_are_refused() -> None:
    assert exact_sum(np.array([1e308, 1e308])) == np.inf
    assert sum_of_squares(np.array([1e200])) == np.inf


def test_slots_of_a_table_by_hand() -> None:
    x = np.array([[1.0], [2.0], [3.0], [6.0]], dtype=np.float32)
    shard = shard_of("kiel", (x, np.array([0, 1, 1, 0]), x[:1] + 1, np.array([1]))).load()
    slots = slots_of(shard, MaskedLayout("fed", {"column 1": Centre(2.0, 1.0)}, ["0", "1"], ["column 1"]))
    # All five rows about the centre 2: -1, 0, 1, 4, 0; the training part as it is.
    assert slots[:8] == [5, 2, 3, 5, 0, 4, 18, Fraction(16, 5)]
    buckets = slots[8 : 8 + 2 * BUCKETS + 1]
    assert sum(buckets) == 5 and buckets[BUCKETS] == 2 and sum(buckets[:BUCKETS]) == 1
    assert slots[8 + 2 * BUCKETS + 1 :] == [4, 12, 50, 0]
    assert packed(MaskedLayout("fed"), [5, 0, 0])


def test_slots_of_numbers_to_predict() -> None:
    x, y = np.ones((4, 2), dtype=np.float32), np.array([1.0, 2.0, 4.0, 5.0])
    shard = shard_of("kiel", (x, y, x[:1], y[:1]), ReadOptions(task="regression")).load()
    assert slots_of(shard, MaskedLayout("fed", targets=["0"])) == [5, 0, 4, 12, 46]


@pytest.mark.parametrize("rows", [3])
def test_series_count_every_step(rows: int) -> None:
    x = np.arange(rows * 8, dtype=np.float32).reshape(rows, 4, 2)
    shard = shard_of("kiel", (x, np.arange(rows) % 2, x[:1], np.array([0]))).load()
    slots = slots_of(shard, MaskedLayout("fed", {"column 1": Centre(0.0, 1.0)}, [], ["column 1", "column 2"]))
    assert slots[:3] == [rows + 1, 4 * (rows + 1), 0] and slots[-6] == 4 * rows
