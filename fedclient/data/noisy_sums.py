"""Sums of a device's own data for a noisy release (attune.common.privacy.noisy_statistics), before the noise.

N rows, F features, U units. Each row counts in full, or in a group by its share of the group. The contribution of each row is
cut towards zero to a multiple of 1 / GRID, which makes it no longer. So the sums are exact: one unit moves them by its own
contribution, and by no error of rounding.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from attune.common.errors import UpdateRefused
from attune.common.privacy.noisy_statistics import BINS, NoisyLayout
from attune.common.schema import Schema
from attune.fedclient.data.arrays import Array
from attune.fedclient.data.shard import Shard
from attune.fedclient.data.site_sums import feature_names

GRID = 2.0**30
MOST_ROWS = 1 << 22  # sums of so many multiples of 1 / GRID are exact in float64
MISSING = -1
Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]


def unit_sums(shard: Shard, layout: NoisyLayout) -> tuple[int, Floats]:
    """Return the number of units, and the sums over all of them, training and test part, (layout.size,).

    Raises:
        UpdateRefused: The shard has no such data, or values that stand for missing ones tell of its other rows.
    """
    _check_shard(shard, layout)
    units, weight_N = _weights(shard, layout.unit)
    columns = _Columns(shard)
    pieces = []
    for name, column in layout.columns.items():
        if column.range is None:
            pieces.append(_counts(columns.places(name, column.values), len(column.values) + 1, weight_N))
        else:
            pieces.append(_number_sums(columns.numbers(name), column.range, weight_N))
    if layout.classes:
        place_of = {label: at for at, label in enumerate(layout.classes)}
        labels = np.concatenate([shard.train_y, shard.test_y]).tolist()
        place_N = np.array([place_of.get(str(label), MISSING) for label in labels], dtype=np.int64)
        pieces.append(_counts(place_N, len(layout.classes), weight_N))
    return units, np.concatenate(pieces)


def _check_shard(shard: Shard, layout: NoisyLayout) -> None:
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
    _, unit_N, count_U = np.unique(np.concatenate(groups), return_inverse=True, return_counts=True)
    return len(count_U), 1.0 / count_U[unit_N]


def _on_grid(values_N: Floats) -> Floats:
    cut: Floats = np.trunc(values_N * GRID) / GRID
    return cut


def _counts(place_N: Places, size: int, weight_N: Floats) -> Floats:
    """Return the weights of the rows at each place, (size,). A row without a value has none."""
    there = place_N != MISSING
    counts = np.bincount(place_N[there], weights=_on_grid(weight_N[there]), minlength=size)
    return np.asarray(counts, dtype=np.float64)  # an empty count is whole


def _number_sums(values_N: Floats, bounds: tuple[float, float], weight_N: Floats) -> Floats:
    """Return count, sum of v and of v^2, and the counts of the bins of v, (MOMENTS + BINS,)."""
    there = ~np.isnan(values_N)
    low, high = bounds
    v_N = np.clip((values_N[there] - (low + high) / 2) / ((high - low) / 2), -1.0, 1.0)
    weight_N = weight_N[there]
    bin_N = np.minimum((v_N + 1) * (BINS / 2), BINS - 1).astype(np.int64)
    moments = [float(_on_grid(weight_N * power_N).sum()) for power_N in (np.ones(len(v_N)), v_N, v_N**2)]
    return np.concatenate([moments, _counts(bin_N, BINS, weight_N)])


class _Columns:
    """Columns of a table by name, as numbers or as places among values, with gaps where the table has them.

    A column that the table lacks has only missing values.
    """

    def __init__(self, shard: Shard) -> None:
        self._rows = len(shard.train_x) + len(shard.test_x)
        self._schema: Schema | None = shard.schema
        self._targets = {f"target {label}": at for at, label in enumerate(shard.labels if shard.task == "regression" else ())}
        self._y = (shard.train_y, shard.test_y)
        self._places: dict[str, int] = {}
        if shard.kind == "tabular":
            self._x = np.concatenate([_gappy(shard.train_x, shard.train_gaps), _gappy(shard.test_x, shard.test_gaps)])
            self._places = {name: at for at, name in enumerate(feature_names(shard))}

    def numbers(self, name: str) -> Floats:
        """Return a column of numbers, (N,), with NaN for missing values."""
        if name in self._targets:
            targets: Floats = np.concatenate(self._y)[:, self._targets[name]].astype(np.float64)
            return targets
        at = self._places.get(name)
        is_other = self._schema is not None and (name not in self._schema.used or self._schema.used[name].kind == "category")
        if at is None or is_other:  # it may be the feature of a category
            return np.full(self._rows, np.nan)
        column: Floats = self._x[:, at]
        return column

    def places(self, name: str, values: Collection[str]) -> Places:
        """Return the place of each row's value among these, (N,); the last place is for others. MISSING: it has none."""
        column = self._schema.used.get(name) if self._schema is not None else None
        if column is None or column.kind not in ("category", "yes/no"):
            return np.full(self._rows, MISSING)
        place_of = {value: at for at, value in enumerate(values)}
        own_N = self._own_places(name, column.kind == "yes/no" or column.encoding == "embedding", len(column.values))
        where = np.array([place_of.get(value, len(values)) for value in column.values] + [len(values), MISSING])
        place_N: Places = where[own_N]
        return place_N

    def _own_places(self, name: str, is_index: bool, count: int) -> Places:
        """Return the place among the device's own values, (N,); then follow `other` and what is missing."""
        features = self._schema.features() if self._schema is not None else []
        at = [place for place, feature in enumerate(features) if feature.column == name and feature.role != "missing"]
        if is_index:
            place_N: Places = np.nan_to_num(self._x[:, at[0]], nan=count + 1).astype(np.int64)
            return place_N
        one_hot = self._x[:, at] == 1
        return np.where(one_hot.any(axis=1), one_hot.argmax(axis=1), count + 1)


def _gappy(x: Array, gaps_NF: npt.NDArray[np.bool_] | None) -> Floats:
    """Return features, (N, F), with NaN in place of what was filled in."""
    return np.asarray(x if gaps_NF is None else np.where(gaps_NF, np.nan, x), dtype=np.float64)
