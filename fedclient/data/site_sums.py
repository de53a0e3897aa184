"""Statistics of a device's own data: the answers to the two passes of `fedserver statistics`, and whether units fit a schema.

The device compares a table's units with the usual ranges of a schema, and tells a word for each column. N samples, F features.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt

from attune.common.schema import Schema, UnitVerdict
from attune.common.site_statistics import (
    BUCKETS,
    FIRST_STEP,
    GROWTH,
    NEAREST,
    Centre,
    ColumnSketch,
    ColumnSums,
    SiteSketches,
    SiteSums,
    output_columns,
)
from attune.fedclient.data.arrays import Array
from attune.fedclient.data.shard import Shard
from attune.fedclient.data.table_encoder import with_gaps


def site_sums(shard: Shard, wanted: Collection[str] = ()) -> SiteSums:
    """Return the sums over all rows of a shard, of its training and its test part.

    Args:
        shard: The shard. Columns are those of tables, the channels of series, and `output_columns`.
        wanted: Names of columns; empty: all.
    """
    sums = {name: column_sums(values_N) for name, values_N in columns_in(shard, wanted).items()}
    classes = class_counts(shard) if shard.task == "classes" else []
    return SiteSums(len(shard.train_x) + len(shard.test_x), sums, classes)


def class_counts(shard: Shard) -> list[int]:
    """Return the samples of each class, in the order of the shard's labels."""
    names, counts = np.unique(np.concatenate([shard.train_y.ravel(), shard.test_y.ravel()]), return_counts=True)
    count_of = {str(name): int(count) for name, count in zip(names.tolist(), counts.tolist(), strict=True)}
    return [count_of.get(str(label), 0) for label in shard.labels]


def site_sketches(shard: Shard, centres: Mapping[str, Centre]) -> SiteSketches:
    """Return the sketches of the columns that have a centre."""
    columns = columns_in(shard, centres.keys()) if centres else {}
    return SiteSketches({name: sketch_of(values_N, centres[name]) for name, values_N in columns.items()})


def feature_names(shard: Shard) -> list[str]:
    """Return the names of the features of a table or a series."""
    return list(shard.column_names) or [f"column {number + 1}" for number in range(shard.train_x.shape[-1])]


def columns_in(shard: Shard, wanted: Collection[str]) -> dict[str, npt.NDArray[np.float64]]:
    """Return the columns by name, each with all its rows, (N,) float64, with NaN for missing values."""
    columns: dict[str, npt.NDArray[np.float64]] = {}
    if shard.kind in ("tabular", "series"):
        width = shard.train_x.shape[-1]
        rows = np.concatenate([part.reshape(-1, width) for part in (shard.train_x, shard.test_x)])
        if shard.schema is not None:
            rows = with_gaps(rows, shard.schema)
        names = feature_names(shard)
        columns = {name: rows[:, place].astype(np.float64) for place, name in enumerate(names) if not wanted or name in wanted}
    outputs = output_columns(shard.task, shard.labels)
    y = np.concatenate([shard.train_y, shard.test_y]).astype(np.float64) if outputs else np.empty(0)
    if shard.task == "survival":
        y[:, 1] = np.where(y[:, 1] > 0, y[:, 0], np.nan)
    return columns | {name: y[:, place] for place, name in enumerate(outputs) if not wanted or name in wanted}


def column_sums(values_N: npt.NDArray[np.float64]) -> ColumnSums:
    """Return the sums of one column. NaN is a missing value.

    Args:
        values_N: The column, (N,).
    """
    present = values_N[~np.isnan(values_N)]
    mean = float(present.mean()) if len(present) else 0.0
    return ColumnSums(len(present), len(values_N) - len(present), mean, float(np.square(present - mean).sum()))


def sketch_of(values_N: npt.NDArray[np.float64], centre: Centre) -> ColumnSketch:
    """Return the sketch of one column. Missing values are left out.

    Args:
        values_N: The column, (N,), with NaN for missing values.
        centre: Mean and deviation of the fleet.
    """
    distance = (values_N[~np.isnan(values_N)] - centre.mean) / (centre.deviation or 1.0)
    size = np.abs(distance)
    with np.errstate(divide="ignore"):
        steps = np.ceil(np.log(size) / GROWTH) - FIRST_STEP
    bucket = np.where(size <= NEAREST, 0, np.sign(distance) * np.clip(steps, 1, BUCKETS)).astype(np.int64)
    if not len(bucket):
        return ColumnSketch(0, [])
    first = int(bucket.min())
    return ColumnSketch(first, np.bincount(bucket - first).tolist())


_FEWEST = 10  # values; with fewer nothing is said
_FITTING = 0.9  # share of values that must lie in the range
_MARGIN = 0.25  # of the range's width, added at both ends
_FACTORS: dict[UnitVerdict, tuple[float, ...]] = {"factor 10": (10, 100, 1000), "factor 2.54": (2.54,)}


def units_of_shard(shard: Shard) -> dict[str, UnitVerdict]:
    """Return the verdicts on a shard that was made by a schema. What was filled in does not count, where features tell it."""
    if shard.schema is None:
        return {}
    x = np.concatenate([shard.train_x, shard.test_x])
    return unit_verdicts(with_gaps(x, shard.schema), shard.schema)


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
