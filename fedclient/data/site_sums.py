"""Numbers of a device's own data, clear, masked or noised (attune.common.site_statistics), and whether units fit a schema.

N rows, F features, U units, all of the training and the test part. Beside noise each row counts in full, or in a group by its
share of the group, and the contribution of each row is cut towards zero to a multiple of 1 / GRID, which makes it no longer. So
the sums are exact: one unit moves them by its own contribution, and by no error of rounding. The masked sums are as exact as
the slots of their number. The device also compares a table's units with the usual ranges of a schema, and tells a word for each
column.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from attune.common.errors import UpdateRefused
from attune.common.schema import Schema, UnitVerdict
from attune.common.site_statistics import (
    BINS,
    BUCKETS,
    FIRST_STEP,
    GROWTH,
    NEAREST,
    Centre,
    ColumnSketch,
    ColumnSums,
    MaskedLayout,
    NoisyColumn,
    NoisyLayout,
    SiteSketches,
    SiteSums,
    output_columns,
)
from attune.fedclient.data.arrays import Array
from attune.fedclient.data.shard import Shard
from attune.fedclient.data.table_encoder import with_gaps

GRID = 2.0**30
MOST_ROWS = 1 << 22  # sums of so many multiples of 1 / GRID are exact in float64
Floats = npt.NDArray[np.float64]
SlotValues = list[int | float | Fraction]


# --- columns of a shard, with NaN for missing values


def feature_names(shard: Shard) -> list[str]:
    """Return the names of the features of a table or a series."""
    return list(shard.column_names) or [f"column {number + 1}" for number in range(shard.train_x.shape[-1])]


def features_of(shard: Shard, all_gaps: bool = False) -> Floats:
    """Return the features of a table or a series, (N, F).

    Args:
        shard: The shard.
        all_gaps: Whether all that was filled in is missing, and not only what an indicator tells.
    """
    width = shard.train_x.shape[-1]
    x_NF: Floats = np.concatenate([part.reshape(-1, width) for part in (shard.train_x, shard.test_x)]).astype(np.float64)
    if all_gaps and shard.train_gaps is not None and shard.test_gaps is not None:
        return np.where(np.concatenate([shard.train_gaps, shard.test_gaps]), np.nan, x_NF)
    return x_NF if all_gaps or shard.schema is None else with_gaps(x_NF, shard.schema)


def columns_in(shard: Shard, wanted: Collection[str] = ()) -> dict[str, Floats]:
    """Return the columns by name, each with all its rows, (N,): features of tables, channels of series, and `output_columns`.

    Args:
        shard: The shard.
        wanted: Names of columns; empty: all.
    """
    columns: dict[str, Floats] = {}
    if shard.kind in ("tabular", "series"):
        columns = dict(zip(feature_names(shard), features_of(shard).T, strict=True))
    if outputs := output_columns(shard.task, shard.labels):
        y_NK = np.concatenate([shard.train_y, shard.test_y]).astype(np.float64)
        if shard.task == "survival":
            y_NK[:, 1] = np.where(y_NK[:, 1] > 0, y_NK[:, 0], np.nan)
        columns |= dict(zip(outputs, y_NK.T, strict=False))
    return {name: values_N for name, values_N in columns.items() if not wanted or name in wanted}


def label_places(shard: Shard, labels: Sequence[str]) -> Floats:
    """Return the place of each row's label among these, (N,)."""
    place_of = {label: float(at) for at, label in enumerate(labels)}
    names, name_N = np.unique(np.concatenate([shard.train_y.ravel(), shard.test_y.ravel()]), return_inverse=True)
    return np.array([place_of.get(str(name), math.nan) for name in names.tolist()])[name_N]


def _noisy_columns(shard: Shard, forms: Mapping[str, NoisyColumn]) -> dict[str, Floats]:
    """Return columns as a noisy release counts them, (N,): numbers, or places among the declared values and `other`.

    A column that the table lacks, or has as another kind, has only missing values.
    """
    x_NF = (
        features_of(shard, all_gaps=True) if shard.kind == "tabular" else np.empty((len(shard.train_x) + len(shard.test_x), 0))
    )
    targets = columns_in(shard, output_columns(shard.task, shard.labels)) if shard.task == "regression" else {}
    numbers = dict(zip(feature_names(shard), x_NF.T, strict=False))
    if shard.schema is not None:  # a category may have a feature of its name
        numbers = {
            name: numbers[name] for name, column in shard.schema.used.items() if name in numbers if column.kind != "category"
        }
    columns, gone_N = {}, np.full(len(x_NF), np.nan)
    for name, form in forms.items():
        if form.range is None:
            columns[name] = _places_among(form.values, name, x_NF, shard.schema)
        else:
            columns[name] = targets.get(name, numbers.get(name, gone_N))
    return columns


def _places_among(values: Sequence[str], name: str, x_NF: Floats, schema: Schema | None) -> Floats:
    column = schema.used.get(name) if schema is not None else None
    if schema is None or column is None or column.kind not in ("category", "yes/no"):
        return np.full(len(x_NF), np.nan)
    count = len(column.values)
    at = [place for place, one in enumerate(schema.features()) if one.column == name and one.role != "missing"]
    if column.kind == "yes/no" or column.encoding == "embedding":
        own_N = np.nan_to_num(x_NF[:, at[0]], nan=count + 1).astype(np.int64)
    else:
        one_hot = x_NF[:, at] == 1
        own_N = np.where(one_hot.any(axis=1), one_hot.argmax(axis=1), count + 1)
    place_of = {value: place for place, value in enumerate(values)}
    return np.array([*(place_of.get(value, len(values)) for value in column.values), len(values), np.nan])[own_N]


# --- numbers of one column


class ColumnNumbers(NamedTuple):
    """Numbers of one column: rows with a value and without one, sums of what it is scaled to, of its squares, and counts."""

    rows: float
    missing: int
    total: float | Fraction
    squares: float | Fraction
    counts: npt.NDArray[Any]


def column_numbers(values_N: Floats, form: Centre | NoisyColumn, weight_N: Floats | None = None) -> ColumnNumbers:
    """Return the numbers of one column.

    Args:
        values_N: The column, (N,).
        form: How it is counted.
        weight_N: Weight of each row, (N,), for a noisy release; None: each row is one, and sums are as exact as `exact_sum`.
    """
    scaled_N, place_N, size = _placed(values_N, form)
    there_N, counts = ~np.isnan(values_N), counted(place_N, size, weight_N)
    v_N = scaled_N[there_N]
    missing = len(values_N) - len(v_N)
    if weight_N is None:
        return ColumnNumbers(len(v_N), missing, exact_sum(v_N), sum_of_squares(v_N), counts)
    weight_N = weight_N[there_N]
    moments = (float(_on_grid(weight_N * power_N).sum()) for power_N in (np.ones(len(v_N)), v_N, v_N**2))
    rows, total, squares = moments
    return ColumnNumbers(rows, missing, total, squares, counts)


def _placed(values_N: Floats, form: Centre | NoisyColumn) -> tuple[Floats, Floats, int]:
    """Return values as they are summed, their places among the counts, and how many places there are."""
    middle, half = form.unit
    if isinstance(form, Centre):
        distance_N = values_N - middle
        size_N = np.abs(distance_N / (form.deviation or 1.0))
        with np.errstate(divide="ignore"):
            steps_N = np.ceil(np.log(size_N) / GROWTH) - FIRST_STEP
        bucket_N = np.where(size_N <= NEAREST, 0, np.sign(distance_N) * np.clip(steps_N, 1, BUCKETS))
        return distance_N, bucket_N + BUCKETS, 2 * BUCKETS + 1
    if form.range is None:
        return values_N, values_N, form.places
    v_N = np.clip((values_N - middle) / half, -1.0, 1.0)
    return v_N, np.minimum(np.floor((v_N + 1) * (BINS / 2)), BINS - 1), BINS


def counted(place_N: Floats, size: int, weight_N: Floats | None = None) -> npt.NDArray[Any]:
    """Return the number of rows at each place, or their weights, (size,). A missing value has no place."""
    there_N = ~np.isnan(place_N)
    weights = None if weight_N is None else _on_grid(weight_N[there_N])
    counts = np.bincount(place_N[there_N].astype(np.int64), weights, size)
    return counts if weight_N is None else counts.astype(np.float64)  # an empty count is whole


def _on_grid(values_N: Floats) -> Floats:
    cut: Floats = np.trunc(values_N * GRID) / GRID
    return cut


def exact_sum(values_N: Floats) -> Fraction | float:
    """Return the sum of these numbers, to twice the precision of a float; infinity where it overflows."""
    numbers = values_N.tolist()
    try:
        rough = math.fsum(numbers)
    except OverflowError:
        return math.inf
    return Fraction(rough) + Fraction(math.fsum([*numbers, -rough])) if math.isfinite(rough) else rough


def sum_of_squares(values_N: Floats) -> Fraction | float:
    """Return the sum of the squares, as exact as `exact_sum`: a variance stays when the squared mean is subtracted.

    A number is the sum of its 24 leading bits and the rest, so the three products of its square fit into floats.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        leading_N = values_N.astype(np.float32).astype(np.float64)
        leading_N = np.where(np.isfinite(leading_N), leading_N, values_N)
        rest_N = values_N - leading_N
        return exact_sum(np.concatenate([leading_N**2, 2 * leading_N * rest_N, rest_N**2]))


# --- numbers of a shard: clear, masked, noised


def site_sums(shard: Shard, wanted: Collection[str] = ()) -> SiteSums:
    """Return the sums of these columns, of all if there are none, as they are."""
    sums = {name: column_sums(values_N) for name, values_N in columns_in(shard, wanted).items()}
    classes = class_counts(shard) if shard.task == "classes" else []
    return SiteSums(len(shard.train_x) + len(shard.test_x), sums, classes)


def site_sketches(shard: Shard, centres: Mapping[str, Centre]) -> SiteSketches:
    """Return the sketches of the columns that have a centre."""
    columns = columns_in(shard, centres.keys()) if centres else {}
    return SiteSketches({name: sketch_of(values_N, centres[name]) for name, values_N in columns.items()})


def class_counts(shard: Shard) -> list[int]:
    """Return the samples of each class, in the order of the shard's labels."""
    labels = list(map(str, shard.labels))
    return list(map(int, counted(label_places(shard, labels), len(labels))))


def column_sums(values_N: Floats) -> ColumnSums:
    """Return the sums of one column, (N,)."""
    present = values_N[~np.isnan(values_N)]
    mean = float(present.mean()) if len(present) else 0.0
    return ColumnSums(len(present), len(values_N) - len(present), mean, float(np.square(present - mean).sum()))


def sketch_of(values_N: Floats, centre: Centre) -> ColumnSketch:
    """Return the sketch of one column, (N,)."""
    _, place_N, size = _placed(values_N, centre)
    counts = counted(place_N, size)
    places = np.flatnonzero(counts)
    if not len(places):
        return ColumnSketch(0, [])
    return ColumnSketch(int(places[0]) - BUCKETS, counts[places[0] : places[-1] + 1].tolist())


def slots_of(shard: Shard, layout: MaskedLayout) -> SlotValues:
    """Return the slots of a shard for a masked sum.

    Every device of a sum fills every slot: a column that one device alone has would be that device's own.

    Raises:
        UpdateRefused: The shard has other classes, features or targets than the layout, lacks a column, or has no value in one.
    """
    slots: SlotValues = [len(shard.train_x) + len(shard.test_x)]
    if layout.classes:
        if shard.task != "classes" or [str(label) for label in shard.labels] != layout.classes:
            raise UpdateRefused("its classes are not those of the masked sum")
        slots += class_counts(shard)
    columns = columns_in(shard, layout.columns.keys()) if layout.columns else {}
    for name, centre in layout.columns.items():
        rows, missing, total, squares, counts = column_numbers(columns.get(name, np.empty(0)), centre)
        if not rows:
            raise UpdateRefused(f"its data have no value in the column {name!r} of the masked sum")
        slots += [rows, missing, total, squares, total * total / int(rows), *counts.tolist()]
    features = feature_names(shard) if shard.kind in ("series", "tabular") else []
    targets = list(map(str, shard.labels)) if shard.task == "regression" else []
    slots += _moments(shard.train_x, layout.features, features)
    slots += _moments(shard.train_y, layout.targets, targets)
    return slots


def _moments(part: Array, wanted: list[str], names: list[str]) -> SlotValues:
    """Return the rows of a training part, and for each of its columns the sums of the values and of their squares."""
    if not wanted:
        return [0]
    if wanted != names:
        raise UpdateRefused("its features or targets are not those of the masked sum")
    columns: Floats = part.reshape(-1, len(names)).astype(np.float64)
    sums = ((exact_sum(values_N), sum_of_squares(values_N)) for values_N in columns.T)
    return [len(columns), *(number for pair in sums for number in pair)]


def unit_sums(shard: Shard, layout: NoisyLayout) -> tuple[int, Floats]:
    """Return the number of units, and the sums over all of them before the noise, (layout.size,).

    Raises:
        UpdateRefused: The shard has no such data, or values that stand for missing ones tell of its other rows.
    """
    _check_unit_sums(shard, layout)
    units, weight_N = _weights(shard, layout.unit)
    pieces = list[Any]()
    for name, values_N in _noisy_columns(shard, layout.columns).items():
        form = layout.columns[name]
        rows, _, total, squares, counts = column_numbers(values_N, form, weight_N)
        pieces += [counts] if form.range is None else [[rows, total, squares], counts]
    if layout.classes:
        pieces.append(counted(label_places(shard, layout.classes), len(layout.classes), weight_N))
    return units, np.concatenate(pieces)


def _check_unit_sums(shard: Shard, layout: NoisyLayout) -> None:
    if len(shard.train_x) + len(shard.test_x) > MOST_ROWS:
        raise UpdateRefused(f"its data have more than {MOST_ROWS:,} rows, too many for exact sums")
    if layout.classes and (shard.task != "classes" or shard.per_position):
        raise UpdateRefused("its samples have no classes")
    if layout.columns and shard.kind != "tabular":
        raise UpdateRefused("its data are no table")
    if shard.fill is not None and shard.train_gaps is None:
        raise UpdateRefused("medians stand for its missing values, and they tell of other rows: give it a schema (--schema)")


def _weights(shard: Shard, unit: str) -> tuple[int, Floats]:
    """Return the number of units, and the weight of each row, (N,): the weights of a unit's rows add up to at most 1."""
    rows = len(shard.train_x) + len(shard.test_x)
    if unit == "example":
        return rows, np.ones(rows)
    groups = [part for part in (shard.groups, shard.test_groups) if part is not None]
    if sum(map(len, groups)) != rows:
        raise UpdateRefused("the question is for groups of samples, and its data name none (--group)")
    names = np.concatenate(groups)
    return len(np.unique(names)), group_weights(names)


def group_weights(groups: Array) -> Floats:
    """Return weights of samples, (N,), such that every group counts as one sample."""
    _, place_N, size_G = np.unique(groups, return_inverse=True, return_counts=True)
    return np.asarray(1.0 / size_G[place_N])


# --- units


_FEWEST = 10  # values; with fewer nothing is said
_FITTING = 0.9  # share of values that must lie in the range
_MARGIN = 0.25  # of the range's width, added at both ends
_FACTORS: dict[UnitVerdict, tuple[float, ...]] = {"factor 10": (10, 100, 1000), "factor 2.54": (2.54,)}


def units_of_shard(shard: Shard) -> dict[str, UnitVerdict]:
    """Return the verdicts on a shard that was made by a schema. What was filled in does not count, where features tell it."""
    if shard.schema is None:
        return {}
    return unit_verdicts(features_of(shard), shard.schema)


def unit_verdicts(x: Array, schema: Schema) -> dict[str, UnitVerdict]:
    """Return a verdict for each column that has a range in the schema and enough values in the features, (N, F).

    `factor 10` stands for 10, 100 and 1000, and for their inverse; so does `factor 2.54` for both directions.
    """
    verdicts: dict[str, UnitVerdict] = {}
    for at, feature in enumerate(schema.features()):
        usual = schema.columns[feature.column].range
        values = x[~np.isnan(x[:, at]), at].astype(np.float64)
        if feature.role == "number" and usual is not None and len(values) >= _FEWEST:
            verdicts[feature.column] = verdict_of(values, usual)
    return verdicts


def verdict_of(values: npt.NDArray[np.float64], usual: tuple[float, float]) -> UnitVerdict:
    """Return whether values, (N,), lie in the usual range, or would if a factor of a common mistake were divided out."""
    if _fits(values, usual):
        return "fits"
    for verdict, factors in _FACTORS.items():
        if any(_fits(values * factor, usual) or _fits(values / factor, usual) for factor in factors):
            return verdict
    return "differs"


def _fits(values: npt.NDArray[np.float64], usual: tuple[float, float]) -> bool:
    """Return whether most values lie in the range with its margin, and the median in the range itself."""
    low, high = usual
    margin = _MARGIN * (high - low)
    inside = np.mean((values >= low - margin) & (values <= high + margin))
    return bool(inside >= _FITTING and low <= np.median(values) <= high)
