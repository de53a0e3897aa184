"""Features of a table by its schema: the same class at training, evaluation and prediction.

N samples, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import date
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from attune.common.classes import NO, YES
from attune.common.errors import NonFiniteFeatures, ShardError
from attune.common.plan import Plan
from attune.common.schema import ROLES, Column, Feature, Schema
from attune.common.text import listed
from attune.fedclient.data import cells as cell_rules
from attune.fedclient.data.arrays import Array
from attune.fedclient.data.cells import is_missing
from attune.fedclient.data.stand_ins import days_of
from attune.fedclient.data.standardiser import UNSEEN, Standardiser
from attune.fedclient.data.table import DataTable

Floats = npt.NDArray[np.float64]
Rescaling = tuple[Floats, Floats]  # factor and shift


class EncodedTable(NamedTuple):
    """Features of a table.

    Attributes:
        x: (N, F) float32. A missing number is NaN, until the median of a training part takes its place.
        notes: What was left out or filled, for people.
    """

    x: Array
    notes: tuple[str, ...]


class TableEncoder:
    """Encoder of tables by a schema. It keeps nothing of the tables that it encodes.

    A number, a date and yes/no are one feature. A category is a feature for each value and one for all others, or an index:
    its values from 0 on, then `other`, then `missing`. A column that the table lacks has only missing values.
    """

    def __init__(self, schema: Schema) -> None:
        self.schema, self._features = schema, schema.features()

    def encode(self, table: DataTable, allowed: Collection[str] | None = None) -> EncodedTable:
        """Return the features of a table.

        Args:
            table: The table. Its column with the label is not needed.
            allowed: Columns that may be used, by the decision of the data's owner; None: all.

        Raises:
            ShardError: A cell does not fit the kind of its column, values are missing where the schema refuses that, or the
                table has none of the schema's columns.
            NonFiniteFeatures: A number is infinite, or too large for 32-bit floats.
        """
        used = self.schema.used
        there = [name for name in used if name in table.cells and (allowed is None or name in allowed)]
        if not there:
            raise ShardError(f"{table.path} has none of the columns that the schema uses: {listed(list(used))}")
        values: dict[str, Floats] = {}
        wrong: list[str] = []
        strange: dict[str, list[str]] = {}
        for name, column in used.items():
            if name not in there:
                values[name] = np.full(len(table), np.nan)
                continue
            values[name], cells = _values(table, name, column)
            if cells and column.kind in ("category", "yes/no"):
                strange[name] = sorted({str(table.cells[name][at])[:40] for at in cells})
            elif cells:  # a device tells the server its errors, so they quote no cell
                more = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
                wrong.append(f"{name!r} holds no {column.kind} in sample {cells[0] + 1}{more}")
        if wrong:
            raise ShardError(
                f"{table.path} does not fit its schema: {listed(wrong)}. Correct the cells, say --missing-words usual,WORD if "
                "such a word means a missing value, or give the column another kind in the schema"
            )
        self._check_complete(table, values)
        columns = [_feature(feature, used[feature.column], values[feature.column]) for feature in self._features]
        x = np.column_stack(columns)
        self._check_range(table, x)
        return EncodedTable(x.astype(np.float32), tuple(self._notes(table, there, strange)))

    @property
    def neutral(self) -> Floats:
        """Values in place of missing ones where a training part has none, (F,): the middle of a column's range, or 0."""
        return np.array([feature.neutral for feature in self._features])

    @property
    def is_scaled(self) -> npt.NDArray[np.bool_]:
        """Which features are standardised, (F,): numbers, dates and yes/no. The others are 0 and 1, or an index."""
        return np.array([feature.role == "number" for feature in self._features])

    @property
    def public_scale(self) -> tuple[Floats, Floats]:
        """Middle and half width of each feature's bounds in the schema, (F,) each; 0 and 1 for features that are not scaled."""
        bounds = [feature.bounds if feature.role == "number" and feature.bounds else (-1.0, 1.0) for feature in self._features]
        low_F, high_F = np.array(bounds).T
        return (low_F + high_F) / 2, (high_F - low_F) / 2

    def _check_complete(self, table: DataTable, values: dict[str, Floats]) -> None:
        lacking = {
            name: int(np.isnan(values[name]).sum()) for name, column in self.schema.used.items() if column.missing == "refuse"
        }
        named = [f"{name} ({count})" for name, count in lacking.items() if count]
        if named:
            raise ShardError(
                f"{table.path} lacks values in the columns (how many): {listed(named)}, and the schema says "
                'missing = "refuse": fill them in, or change the schema'
            )

    def _check_range(self, table: DataTable, x: Floats) -> None:
        large = (np.abs(x) > np.finfo(np.float32).max).any(axis=0)
        if large.any():
            names = [self._features[at].column for at in np.flatnonzero(large)]
            raise NonFiniteFeatures(
                f"{table.path} holds numbers that are infinite or too large for 32-bit floats in {listed(names)}: correct "
                "them, or say --missing-words usual,NUMBER if such a number means a missing value"
            )

    def _notes(self, table: DataTable, there: list[str], strange: dict[str, list[str]]) -> list[str]:
        notes = []
        if lacking := [name for name in self.schema.used if name not in there]:
            notes.append(f"not in {table.path.name}, so filled like missing values: {listed(lacking)}")
        for name, texts in strange.items():
            column = self.schema.columns[name]
            place = "the value `other`" if column.kind == "category" else "missing values"
            notes.append(f"values of {name} that the schema does not know count as {place}: {listed(texts)}")
        if out := [f"{name} ({why})" for name, why in self.schema.left_out.items() if name in table.cells]:
            notes.append(f"left out by the schema: {listed(out)}")
        known = {name for name, column in self.schema.columns.items() if column.kind in ROLES} | self.schema.left_out.keys()
        if more := [name for name in table.names if name not in self.schema.columns and name not in known]:
            notes.append(f"left out, since the schema does not know them: {listed(more)}")
        return notes


def _values(table: DataTable, name: str, column: Column) -> tuple[Floats, list[int]]:
    """Return the column as numbers, (N,), and the places of cells that do not fit it. Missing values are NaN.

    Of a category the number is the place among its values; `other` is the place behind them.
    """
    parse = _PARSERS[column.kind](column)
    values = np.full(len(table), np.nan)
    wrong = []
    for at, cell in enumerate(table.cells[name]):
        if is_missing(cell, table.words):
            continue
        try:
            values[at] = parse(cell)
        except (ValueError, OverflowError):
            wrong.append(at)
            if column.kind == "category":
                values[at] = len(column.values)
    return values, wrong


def _feature(feature: Feature, column: Column, values: Floats) -> Floats:
    """Return one feature, (N,), of the numbers of its column."""
    if feature.role == "number":
        return values
    if feature.role == "missing":
        return np.isnan(values).astype(np.float64)
    if feature.role == "index":
        return np.asarray(np.nan_to_num(values, nan=len(column.values) + 1), dtype=np.float64)
    place = column.values.index(feature.value) if feature.role == "value" else len(column.values)
    return np.asarray(values == place, dtype=np.float64)


def with_gaps(x: Array, schema: Schema) -> Floats:
    """Return features, (N, F), with NaN in place of what was filled in, where an indicator tells it."""
    places = {(feature.column, feature.role): at for at, feature in enumerate(schema.features())}
    x = x.astype(np.float64)
    for (name, role), at in places.items():
        if role == "missing" and (filled := places.get((name, "number"))) is not None:
            x[x[:, at] == 1, filled] = np.nan
    return x


def value_of(cell: Any) -> str:
    """Return the value of a category in a cell that is not missing, as a schema lists it.

    Raises:
        ValueError: The cell holds no such value.
    """
    return str(cell_rules.label_of(cell))


def _category_parser(column: Column) -> Callable[[Any], float]:
    places = {value: at for at, value in enumerate(column.values)}

    def parse(cell: Any) -> float:
        place = places.get(value_of(cell))
        if place is None:
            raise ValueError("it is no value of this category")
        return float(place)

    return parse


def _yes_no_parser(column: Column) -> Callable[[Any], float]:
    words = dict.fromkeys(NO, 0.0) | dict.fromkeys(YES, 1.0)
    words |= {word.casefold(): float(at) for at, word in enumerate(column.values)}

    def parse(cell: Any) -> float:
        number = words.get(value_of(cell).casefold())
        if number is None:
            raise ValueError("it is neither yes nor no")
        return number

    return parse


def _date_parser(column: Column) -> Callable[[Any], float]:
    origin = date.fromisoformat(column.origin)
    return lambda cell: days_of(cell, origin, column.form)


def _number_or_limit(cell: Any) -> float:
    try:
        return cell_rules.number_of(cell)
    except ValueError:
        return cell_rules.limit_of(cell)


_PARSERS: dict[str, Callable[[Column], Callable[[Any], float]]] = {
    "number": lambda column: _number_or_limit,
    "date": _date_parser,
    "category": _category_parser,
    "yes/no": _yes_no_parser,
}


def to_ranges(schema: Schema | None, plan: Plan, scaling: Standardiser | None) -> Rescaling | None:
    """Return factor and shift, (F,) each, from features in the device's scale to that of the schema's ranges.

    None: the plan does not scale by ranges. A feature that stands for a value has the same scale at every site.
    """
    if schema is None or not plan.scaled_by_ranges:
        return None
    encoder = TableEncoder(schema)
    (mean_F, std_F), is_scaled = encoder.public_scale, encoder.is_scaled
    own_mean_F, own_std_F = (0.0, 1.0) if scaling is None else (scaling.mean, scaling.std)
    return np.where(is_scaled, own_std_F / std_F, 1.0), np.where(is_scaled, (own_mean_F - mean_F) / std_F, 0.0)


def unscaled(schema: Schema | None, scaling: Standardiser) -> Standardiser:
    """Return the scaling for numbers, dates and yes/no alone. Other features stand for values, the same at every site."""
    if schema is None:
        return scaling
    is_scaled = TableEncoder(schema).is_scaled
    return Standardiser(np.where(is_scaled, scaling.mean, 0.0), np.where(is_scaled, scaling.std, 1.0))


def given_scaling(schema: Schema | None, plan: Plan) -> Standardiser | None:
    """Return the scaling of a model that is evaluated without training; None: it has none of its own.

    A feature that its training never saw stays as it was there.
    """
    if not plan.given or plan.scale is None:
        return None
    scaling = Standardiser(np.array(plan.scale.mean), np.array(plan.scale.std))
    numbers, unseen_F = unscaled(schema, scaling), scaling.std >= UNSEEN
    mean_F, std_F = (np.where(unseen_F, *pair) for pair in ((scaling.mean, numbers.mean), (scaling.std, numbers.std)))
    return Standardiser(mean_F, std_F)
