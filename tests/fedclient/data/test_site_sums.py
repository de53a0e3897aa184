"""Sums and slots of a device's statistics, against numpy and fractions, and how far each sample moves noisy ones."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attune.common.errors import UpdateRefused
from attune.common.schema import Column, Schema
from attune.common.secure.masked_sums import packed
from attune.common.site_statistics import (
    ACCURACY,
    BUCKETS,
    NEAREST,
    Centre,
    ColumnSums,
    MaskedLayout,
    NoisyColumn,
    NoisyLayout,
    bucket_value,
)
from attune.fedclient.data.lazy_shard import shard_of
from attune.fedclient.data.shard import Shard, load_shard
from attune.fedclient.data.site_sums import column_sums, exact_sum, sketch_of, slots_of, sum_of_squares, unit_sums
from attune.fedclient.read_options import ReadOptions

SCHEMA = Schema.of(
    {
        "age": Column("number", range=(0.0, 100.0)),
        "sex": Column("category", values=["f", "m"]),
        "town": Column("category", values=["kiel", "lund"], encoding="embedding"),
        "smokes": Column("yes/no", values=["no", "yes"]),
        "ill": Column("label"),
        "who": Column("group"),
    }
)
AGE, SEX, TOWN = NoisyColumn((0.0, 100.0)), NoisyColumn(values=["f", "m"]), NoisyColumn(values=["kiel", "lund"])
COLUMNS = {"age": AGE, "sex": SEX, "town": TOWN, "smokes": NoisyColumn(values=["no", "yes"])}
LAYOUT = NoisyLayout("fed", "example", 1.0, 1e-5, None, COLUMNS, ["0", "1"])
# A row: age, sex, town, smokes, ill, who. Empty cells are missing.
Row = tuple[str, str, str, str, str, str]
AGES, SEXES = ("", "-40", "0", "17.3", "50", "75", "100", "900"), ("", "f", "m", "x")
CELLS = (AGES, SEXES, ("", "kiel", "lund", "oslo"), ("", "no", "yes"), ("0", "1"), ("a", "b"))
FLAT: Row = ("50", "f", "kiel", "no", "0", "a")
SPREAD: Row = ("0", "m", "lund", "yes", "1", "b")


def read(rows: Sequence[Row], folder: Path) -> Shard:
    path = folder / "site.csv"
    path.write_text("age,sex,town,smokes,ill,who\n" + "".join(",".join(row) + "\n" for row in rows))
    return load_shard(path, options=ReadOptions().with_schema(SCHEMA, ()), held=())


def sums_of(rows: Sequence[Row], layout: NoisyLayout, folder: Path) -> npt.NDArray[np.float64]:
    return unit_sums(read(rows, folder), layout)[1]


def test_the_sums_of_a_table_by_hand(tmp_path: Path) -> None:
    rows: list[Row] = [
        ("0", "f", "kiel", "no", "0", "a"),
        ("75", "x", "", "yes", "1", "a"),
        ("", "", "oslo", "", "1", "b"),
        ("900", "m", "lund", "yes", "1", "b"),
    ]
    units, sums = unit_sums(read(rows, tmp_path), LAYOUT)
    bins = [1 if at in (0, 15, 19) else 0 for at in range(20)]  # 75 begins the last quarter; 900 counts as 100
    assert units == 4 and sums[:3].tolist() == [3, -1 + 0.5 + 1, 1 + 0.25 + 1]
    assert sums[3:23].tolist() == bins
    assert sums[23:].tolist() == [1, 1, 1, *(1, 1, 1), *(1, 2, 0), *(1, 3)]  # sex, town, smokes, ill


def test_each_group_counts_as_one_by_hand(tmp_path: Path) -> None:
    rows: list[Row] = [
        ("0", "f", "kiel", "no", "0", "a"),
        ("100", "m", "kiel", "no", "1", "a"),
        ("50", "f", "", "no", "1", "b"),
    ]
    units, sums = unit_sums(read(rows, tmp_path), replaced("group"))
    assert units == 2 and sums[:3].tolist() == [2, 0, 1]
    assert sums[23:].tolist() == [1.5, 0.5, 0, *(1, 0, 0), *(2, 0, 0), *(0.5, 1.5)]


def replaced(unit: str) -> NoisyLayout:
    return NoisyLayout("fed", "group" if unit == "group" else "example", 1.0, 1e-5, None, COLUMNS, ["0", "1"])


def test_no_sample_moves_the_sums_by_more_than_the_norm(tmp_path: Path) -> None:
    """The vector of every possible row is as written down below, and no longer than the norm, which the longest reaches.

    A table of all rows shows that the sums are sums of these vectors; tables with and without a row show it for single ones.
    """
    rows: list[Row] = [(age, sex, town, smokes, ill, "a") for age, sex, town, smokes, ill in itertools.product(*CELLS[:5])]
    assert np.allclose(sums_of(rows, LAYOUT, tmp_path), sum(map(expected, rows)), atol=1e-6)
    for row in rows[::101]:
        assert np.allclose(vector_of(row, tmp_path), expected(row), atol=1e-8)
        assert np.linalg.norm(vector_of(row, tmp_path)) <= LAYOUT.norm
    vectors = np.array([expected(row) for row in rows])
    norms = np.linalg.norm(vectors, axis=1)
    assert norms.max() == pytest.approx(LAYOUT.norm, rel=1e-12)
    apart = np.linalg.norm(vectors[:, None, :23] - vectors[None, :, :23], axis=2)
    assert apart.max() <= 2 * NoisyLayout("fed", "example", 1.0, 1e-5, None, {"age": AGE}).norm


def vector_of(row: Row, folder: Path) -> npt.NDArray[np.float64]:
    """Return how far one row moves the sums, from two tables."""
    rest: list[Row] = [FLAT, SPREAD]
    return sums_of([*rest, row], LAYOUT, folder) - sums_of(rest, LAYOUT, folder)


def expected(row: Row) -> npt.NDArray[np.float64]:
    """Return the vector of a row, written down without the product's code."""
    age, sex, town, smokes, ill, _ = row
    vector = np.zeros(23 + 3 + 3 + 3 + 2)
    if age:
        v = min(1.0, max(-1.0, float(age) / 50 - 1))
        vector[:3] = 1, v, v * v
        vector[3 + min(19, int(min(100.0, max(0.0, float(age))) // 5))] = 1
    for start, text, values in ((23, sex, "fm"), (26, town, ["kiel", "lund"]), (29, smokes, ["no", "yes"])):
        if text:
            vector[start + ([*values].index(text) if text in [*values] else 2)] = 1
    vector[32 + int(ill)] = 1
    return vector


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(*map(st.sampled_from, CELLS)), min_size=1, max_size=6), st.integers(1, 3))
def test_no_group_moves_the_sums_by_more_than_the_norm(tmp_path_factory, rows: list[Row], groups: int) -> None:
    folder, layout = tmp_path_factory.getbasetemp(), replaced("group")
    rest: list[Row] = [(*FLAT[:5], "rest"), (*SPREAD[:5], "rest")]
    named: list[Row] = [(*row[:5], f"g{at % groups}") for at, row in enumerate(rows)]
    whole = sums_of([*rest, *named], layout, folder)
    for group in {row[5] for row in named}:
        without = sums_of([*rest, *(row for row in named if row[5] != group)], layout, folder)
        assert np.linalg.norm(whole - without) <= layout.norm * (1 + 1e-12)


def test_a_filled_in_median_is_no_value(tmp_path: Path) -> None:
    """A median stands where an age is missing. If it counted, one sample that moves the median would move many of them."""
    rows: list[Row] = [("10", *FLAT[1:]), ("20", *FLAT[1:]), *[("", *FLAT[1:])] * 9]
    shard = read(rows, tmp_path)
    assert not np.isnan(shard.train_x).any() and shard.fill is not None
    assert unit_sums(shard, LAYOUT)[1][0] == 2
    gappy = np.array([[1.0], [np.nan], [3.0], [2.0]], dtype=np.float32)
    plain = shard_of("kiel", (gappy, np.array([0, 1, 1, 0])), ReadOptions(missing="median")).load()
    with pytest.raises(UpdateRefused, match="medians stand for its missing values"):
        unit_sums(plain, NoisyLayout("fed", "example", 1.0, 1e-5, None, {"column 1": AGE}))


def test_a_question_that_a_shard_cannot_answer_is_refused(tmp_path: Path) -> None:
    x, y = np.arange(8.0, dtype=np.float32).reshape(4, 2), np.array([0, 1, 1, 0])
    table, series = shard_of("kiel", (x, y)).load(), shard_of("lund", (x.reshape(2, 2, 2), y[:2])).load()
    with pytest.raises(UpdateRefused, match="name none"):
        unit_sums(table, replaced("group"))
    with pytest.raises(UpdateRefused, match="no table"):
        unit_sums(series, LAYOUT)
    scored = replace(table, task="regression", train_y=np.zeros((3, 1)), test_y=np.zeros((1, 1)), declared_classes=["dose"])
    with pytest.raises(UpdateRefused, match="no classes"):
        unit_sums(scored, LAYOUT)


def test_targets_count_and_unknown_columns_are_missing() -> None:
    x, y = np.arange(8.0, dtype=np.float32).reshape(4, 2), np.array([[0.0], [50.0], [100.0], [25.0]])
    shard = shard_of("kiel", (x, y), ReadOptions(task="regression")).load()
    name = f"target {shard.labels[0]}"
    layout = NoisyLayout("fed", "example", 1.0, 1e-5, None, {name: AGE, "sex": SEX, "height": AGE, "column 2": AGE})
    sums = unit_sums(shard, layout)[1]
    assert sums[:3].tolist() == [4, -1 + 0 + 1 - 0.5, 1 + 0 + 1 + 0.25]
    assert not sums[23 : 23 + 3 + 23].any()
    assert sums[49] == 4


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
