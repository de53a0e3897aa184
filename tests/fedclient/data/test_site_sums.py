"""Sums and sketches of columns, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attune.common.site_statistics import ACCURACY, BUCKETS, NEAREST, Centre, ColumnSums, bucket_value
from attune.fedclient.data.site_sums import column_sums, sketch_of


def test_the_sums_of_a_column_by_hand() -> None:
    sums = column_sums(np.array([1.0, np.nan, 3.0]))
    assert (sums.rows, sums.missing, sums.mean, sums.squares) == (2, 1, 2.0, 2.0)
    assert column_sums(np.array([np.nan])) == ColumnSums(0, 1, 0.0, 0.0)


@given(st.floats(-1e9, 1e9), st.floats(-1e5, 1e5), st.floats(1e-3, 1e3))
def test_the_value_of_a_bucket_is_near_each_of_its_values(mean: float, deviations: float, deviation: float) -> None:
    centre = Centre(mean, deviation)
    value = mean + deviations * deviation
    sketch = sketch_of(np.array([value]), centre)
    assert sketch.counts == [1] and abs(sketch.first) <= BUCKETS
    distance = abs(value - mean)
    rounding = 1e-9 * abs(mean)  # of the sum, in float64
    assert bucket_value(sketch.first, centre) == pytest.approx(
        value, abs=max(ACCURACY * distance * (1 + 1e-9), NEAREST * deviation) + rounding
    )


@given(st.lists(st.floats(allow_infinity=False), max_size=50))
def test_each_value_is_in_one_bucket_and_gaps_are_in_none(values: list[float]) -> None:
    sketch = sketch_of(np.array(values, dtype=np.float64), Centre(1.0, 2.0))
    assert sum(sketch.counts) == sum(value == value for value in values)
    assert -BUCKETS <= sketch.first <= sketch.first + len(sketch.counts) <= BUCKETS + 1
