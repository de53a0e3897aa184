"""Layouts and releases of noisy statistics: sizes by hand, and what is refused."""

import math
from typing import Any

import msgspec
import pytest

from attune.common.errors import UpdateRefused
from attune.common.site_statistics import MOST_PLACES, NoisyColumn, NoisyLayout, NoisySums

AGE, SEX = NoisyColumn((0.0, 100.0)), NoisyColumn(values=["f", "m"])
LAYOUT = NoisyLayout("fed", "example", 1.0, 1e-5, 4.0, {"age": AGE, "sex": SEX}, ["ill", "well"])


def test_size_and_norm_by_hand() -> None:
    assert LAYOUT.size == 23 + 3 + 2 and LAYOUT.norm == math.sqrt(4 + 1 + 1)
    assert msgspec.structs.replace(LAYOUT, columns={}).norm == 1 and msgspec.structs.replace(LAYOUT, classes=[]).norm == 5**0.5


@pytest.mark.parametrize(
    "changed",
    [
        {"epsilon": 2.0},
        {"delta": 1e-6},
        {"unit": "group"},
        {"budget": None},
        {"federation": "other"},
        {"classes": ["ill"]},
        {"columns": {"age": AGE}},
        {"columns": {"age": NoisyColumn((0.0, 99.0)), "sex": SEX}},
    ],
)
def test_whatever_changes_the_release_changes_the_digest(changed: dict[str, Any]) -> None:
    assert msgspec.structs.replace(LAYOUT, **changed).digest != LAYOUT.digest
    assert msgspec.structs.replace(LAYOUT).digest == LAYOUT.digest


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"columns": {"age": NoisyColumn()}}, "neither a range nor values for the column 'age'"),
        ({"columns": {"age": NoisyColumn((3.0, 3.0))}}, "neither a range"),
        ({"columns": {"age": NoisyColumn((0.0, math.inf))}}, "neither a range"),
        ({"columns": {}, "classes": []}, "for 0 numbers"),
        ({"classes": ["a"] * (MOST_PLACES + 1)}, "1 to 65,536 are possible"),
        ({"epsilon": 0.0}, "cannot be"),
        ({"delta": 1.0}, "cannot be"),
        ({"format": 2}, "cannot be"),
    ],
)
def test_a_layout_that_no_device_can_fill_is_refused(changed: dict[str, Any], why: str) -> None:
    LAYOUT.check()
    with pytest.raises(UpdateRefused, match=why):
        msgspec.structs.replace(LAYOUT, **changed).check()


@pytest.mark.parametrize(
    "sums",
    [
        NoisySums(10, 3.0, [0.0] * 27),
        NoisySums(13, 3.0, [0.0] * 28),
        NoisySums(10, 0.0, [0.0] * 28),
        NoisySums(10, 1e10, [0.0] * 28),
        NoisySums(10, 3.0, [1e9] + [0.0] * 27),
    ],
)
def test_sums_that_cannot_be_of_the_declared_data_are_refused(sums: NoisySums) -> None:
    NoisySums(12, 3.0, [-9.0] * 28).check(LAYOUT, 12)
    with pytest.raises(UpdateRefused, match="not those of the data"):
        sums.check(LAYOUT, 12)
