"""Statistics of a device's own data as the slots of a masked sum (attune.common.secure.masked_sums)."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from attune.common.errors import UpdateRefused
from attune.common.secure.masked_sums import MaskedLayout
from attune.common.site_statistics import BUCKETS
from attune.fedclient.data.arrays import Array
from attune.fedclient.data.shard import Shard
from attune.fedclient.data.site_sums import class_counts, columns_in, feature_names, sketch_of

Values = npt.NDArray[np.float64]


SlotValues = list[int | float | Fraction]


def slots_of(shard: Shard, layout: MaskedLayout) -> SlotValues:
    """Return the slots of a shard.

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
        values_N = columns.get(name, np.empty(0))
        present = values_N[~np.isnan(values_N)] - centre.mean
        if not len(present):
            raise UpdateRefused(f"its data have no value in the column {name!r} of the masked sum")
        total = exact_sum(present)
        sketch = sketch_of(values_N, centre)
        buckets = np.zeros(2 * BUCKETS + 1, dtype=np.int64)
        buckets[sketch.first + BUCKETS :][: len(sketch.counts)] = sketch.counts
        slots += [len(present), len(values_N) - len(present), total, sum_of_squares(present), total * total / len(present)]
        slots += buckets.tolist()
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
    columns: Values = part.reshape(-1, len(names)).astype(np.float64)
    sums = ((exact_sum(values_N), sum_of_squares(values_N)) for values_N in columns.T)
    return [len(columns), *(number for pair in sums for number in pair)]


def exact_sum(values_N: Values) -> Fraction | float:
    """Return the sum of these numbers, to twice the precision of a float; infinity where it overflows."""
    numbers = values_N.tolist()
    try:
        rough = math.fsum(numbers)
    except OverflowError:
        return math.inf
    return Fraction(rough) + Fraction(math.fsum([*numbers, -rough])) if math.isfinite(rough) else rough


def sum_of_squares(values_N: Values) -> Fraction | float:
    """Return the sum of the squares, as exact as `exact_sum`: a variance stays when the squared mean is subtracted.

    A number is the sum of its 24 leading bits and the rest, so the three products of its square fit into floats.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        leading_N = values_N.astype(np.float32).astype(np.float64)
        leading_N = np.where(np.isfinite(leading_N), leading_N, values_N)
        rest_N = values_N - leading_N
        return exact_sum(np.concatenate([leading_N**2, 2 * leading_N * rest_N, rest_N**2]))
