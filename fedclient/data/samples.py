"""Samples of a table: the columns that are features, those to predict, and the samples for testing; and its federation's words.

A site's names of columns, values and decimal commas are mapped to the words of its federation before anything is made of the
table, so no name or spelling of the site leaves it. N samples, F features.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from attune.common.errors import NonFiniteFeatures, Problems, SettingError, ShardError, nearest
from attune.common.schema import Schema
from attune.common.text import listed
from attune.fedclient.data import cautions
from attune.fedclient.data.arrays import Array, plain_suffix
from attune.fedclient.data.cells import WORDS, Words, has_decimal_comma, words_of, written
from attune.fedclient.data.csv_file import plain_name
from attune.fedclient.data.standardiser import check_none
from attune.fedclient.data.table import CSV_SUFFIXES, PERHAPS, DataTable, read_table
from attune.fedclient.data.table_encoder import TableEncoder
from attune.fedclient.read_options import ReadOptions

_USAGE = "it takes THEIRS=OURS for a column, or COLUMN:THEIRS=OURS,... for values"
_THOUSANDS = re.compile(r"[-+]?[0-9]{1,3}(\.[0-9]{3})+")


def table_of(path: Path, options: ReadOptions) -> DataTable:
    """Read a table, with the names and values that the options give it.

    Raises:
        ShardError: As in `read_table`.
        SettingError: As in `read_table`, or a mapping names a column that the table has not, or one twice.
    """
    return mapped(read_table(path, missing_words(options)), options)


def missing_words(options: ReadOptions) -> Words:
    """Return the words that mean a missing value."""
    return words_of(options.missing_words) if options.missing_words else WORDS


def mapped(table: DataTable, options: ReadOptions) -> DataTable:
    """Return a table with the names and values that the options give it.

    Raises:
        SettingError: A mapping names a column that the table has not, or makes two of one name.
    """
    cells = dict(table.cells)
    if options.decimal == "comma":
        dotted = plain_suffix(table.path) in (*CSV_SUFFIXES, *PERHAPS)  # elsewhere 1.234 can be a number's own point
        cells = {name: [_with_point(cell, dotted) for cell in column] for name, column in cells.items()}
    names: dict[str, str] = {}
    values: list[tuple[str, Mapping[str, str]]] = []
    for text in options.mappings:
        before, equals, after = text.partition("=")
        column, colon, pairs = text.partition(":")
        if equals and plain_name(before) in cells:
            names[plain_name(before)] = plain_name(after)
        elif colon and "=" in pairs:
            values.append((plain_name(column), _pairs_of(text, pairs)))
        else:
            name = plain_name(before)
            why = f"{table.path} has no column {name!r}{nearest(name, cells)}; " if name not in cells else ""
            raise SettingError(f"--map {text!r}: {why}{_USAGE}")
    renamed = [names.get(name, name) for name in cells]
    if twice := sorted({name for name in renamed if renamed.count(name) > 1 or not name}):
        raise SettingError(f"--map gives two columns of {table.path} one name, or an empty one: {listed(twice)}")
    cells = dict(zip(renamed, cells.values(), strict=True))
    notes = list(table.notes)
    for column, words in values:
        column = names.get(column, column)
        if column not in cells:
            raise SettingError(f"--map: {table.path} has no column {column!r}{nearest(column, cells)}")
        cells[column] = [words.get(_key(cell), cell) for cell in cells[column]]
        before = next((before for before, after in names.items() if after == column), column)
        if unused := [word for word in words if word not in map(_key, table.cells[before])]:
            notes.append(f"--map: no cell of {column} is {listed(unused)}")
    index = tuple(names.get(name, name) for name in table.index)
    return replace(table, cells=cells, index=index, notes=tuple(notes))


def _pairs_of(text: str, pairs: str) -> dict[str, str]:
    """Return the values of a mapping by the site's words in small letters.

    Raises:
        SettingError: A part is no pair, or a word stands twice.
    """
    words: dict[str, str] = {}
    for part in next(csv.reader([pairs], skipinitialspace=True)):
        before, equals, after = part.rpartition("=")
        if not equals or _key(before) in words:
            raise SettingError(f"--map {text!r}: {part!r} is no pair THEIRS=OURS of its own; {_USAGE}")
        words[_key(before)] = after.strip()
    return words


def _key(cell: Any) -> str:
    return "" if cell is None else written(cell).strip().casefold()


def _with_point(cell: Any, dotted: bool) -> Any:
    """Return a number with a decimal comma, and maybe points between thousands, as it is written with a point."""
    if has_decimal_comma(cell):
        return cell.strip().replace(".", "").replace(",", ".")
    return cell.strip().replace(".", "") if dotted and isinstance(cell, str) and _THOUSANDS.fullmatch(cell.strip()) else cell


_SHOWN = 8
SPLIT = "split"  # usual name of the column that marks the samples for testing
TRAINING = {"train", "training", "val", "valid", "validation", "dev"}  # each device chooses its validation samples itself
TESTING = {"test", "testing"}

Mask = npt.NDArray[np.bool_]


class TableSamples(NamedTuple):
    """Samples of a table.

    Attributes:
        x: Features, (N, F) float32; missing values are NaN.
        y: Same as in `outputs_of`.
        test: Mask of the samples for testing, (N,), or None if no column marks them.
        names: Names of the F columns of x.
        notes: What the user should know about the columns.
    """

    x: Array
    y: Array
    test: Mask | None
    names: list[str]
    notes: tuple[str, ...]


def samples_of(table: DataTable, options: ReadOptions) -> TableSamples:
    """Return a table's samples.

    Raises:
        ShardError: A cell cannot be used, or no column is left for features.
        SettingError: A column does not exist, or is both label and feature.
    """
    options = options.for_columns(table.names)
    if options.schema is not None:
        return _by_schema(table, options, options.schema)
    outputs, split = [table.label_column(name) for name in options.labels()], split_column(table, options)
    apart = {*outputs, *options.apart, *filter(None, (split, options.group, options.key))}
    table.require(*options.apart, *options.columns, *filter(None, (options.group, options.key)))
    for name in outputs:
        if name in options.columns:
            raise SettingError(f"--columns names {name!r}, the class of {table.path}: it cannot be a feature too")
    features = list(options.columns) or [name for name in table.names if name not in apart and name not in table.index]
    if not features:
        raise ShardError(f"{table.path} has no column left for features beside {', '.join(sorted(apart))}")
    problems, test = Problems(), None
    with problems.collected():
        x = table.numbers(*features)
        _check_range(table, x, features)
        if options.missing == "refuse":
            check_none(x, features, str(table.path))
    with problems.collected():
        y = outputs_of(table, options)
    if split:
        with problems.collected():
            test = _testing(table, split)
    problems.check()
    notes = [*table.notes, *_left_out(table, options, {*features, *apart}), *cautions.of_names(table)]
    notes += cautions.of_equals(table, features, outputs)
    notes += [*cautions.of_features(x, features), *cautions.of_long_cells(table, x, features)]
    if options.task == "classes":
        notes += cautions.of_labels(table, outputs[0], options.threshold)
    return TableSamples(x.astype(np.float32), y, test, features, tuple(notes))


def _by_schema(table: DataTable, options: ReadOptions, schema: Schema) -> TableSamples:
    """Return a table's samples as a schema describes them. Errors are those of `samples_of`."""
    split = split_column(table, options)
    table.require(*options.apart, *filter(None, (options.group, options.key)))
    problems, test = Problems(), None
    with problems.collected():
        roles = {*options.apart, split, options.group, options.key}
        allowed = [name for name in options.columns or table.names if name not in roles]
        x, notes = TableEncoder(schema).encode(table, allowed)
    with problems.collected():
        _check_no_feature([table.label_column(name) for name in options.labels()], schema, table)
        y = outputs_of(table, options)
    if split:
        with problems.collected():
            test = _testing(table, split)
    problems.check()
    outputs = [table.label_column(name) for name in options.labels()]
    used = {name: column for name, column in schema.used.items() if name in allowed}
    notes = (*cautions.of_schema(table, used, outputs), *notes)
    if options.task == "classes":
        notes = (*notes, *cautions.of_labels(table, outputs[0], options.threshold))
    return TableSamples(x, y, test, schema.feature_names, (*table.notes, *notes))


def _check_no_feature(outputs: Sequence[str], schema: Schema, table: DataTable) -> None:
    """Check that what is to be predicted is no feature, from which a model would read it.

    Raises:
        SettingError: It is one in the schema.
    """
    if known := [repr(name) for name in outputs if name in schema.used]:
        raise SettingError(
            f"{listed(known)} is what is to be predicted of {table.path}, and a feature in the schema: give it the kind label "
            "there, or set left_out"
        )


def _left_out(table: DataTable, options: ReadOptions, used: set[str]) -> list[str]:
    """Return which columns are no features although the user did not say so."""
    index = [repr(name) for name in table.index if name not in used]
    notes = [f"left out: the column {', '.join(index)}, an index that only numbers the rows"] if index else []
    others = [name for name in table.names if name not in used and name not in table.index]
    if others:  # there is --columns
        notes.append(f"left out, since --columns does not name them: {listed(others)}")
    return notes


def features_of(table: DataTable, names: Sequence[str]) -> Array:
    """Return the columns that a model takes, (N, F) float32; missing values are NaN.

    Raises:
        ShardError: A cell is no number, or too large.
    """
    x = table.numbers(*names)
    _check_range(table, x, names)
    return x.astype(np.float32)


def _check_range(table: DataTable, x: Array, features: Sequence[str]) -> None:
    """Check that all numbers fit into 32-bit floats.

    Raises:
        NonFiniteFeatures: Some do not. The message names their columns.
    """
    large = np.abs(x) > np.finfo(np.float32).max
    if large.any():
        listed = ", ".join(
            f"{features[at]!r} ({x[large[:, at], at][0]:g})" for at in np.flatnonzero(large.any(axis=0))[:_SHOWN]
        )
        raise NonFiniteFeatures(
            f"{table.path} holds numbers that are infinite or too large for 32-bit floats, in the columns: {listed}; correct "
            "them, or leave the columns out with --apart. If such a number stands for a missing value, say "
            "--missing-words usual,NUMBER"
        )


def outputs_of(table: DataTable, options: ReadOptions) -> Array:
    """Return y of a table: the classes, (N,), or in other tasks the numbers of the K given columns, (N, K).

    Raises:
        ShardError: A cell cannot be used, or is missing.
        SettingError: A column does not exist, or there is a threshold and it holds text.
    """
    options = options.for_columns(table.names)
    outputs = [table.label_column(name) for name in options.labels()]
    if options.task == "classes":
        return table.labels(outputs[0]) if options.threshold is None else table.above(outputs[0], options.threshold)
    flags = {"multilabel": outputs, "survival": outputs[1:]}.get(options.task, [])
    return table.outcomes(outputs, flags, "the event" if options.task == "survival" else "yes or no")


def split_column(table: DataTable, options: ReadOptions) -> str:
    """Return the name of the column that marks the samples for testing, or "" if there is none.

    Raises:
        SettingError: The column that the options name does not exist.
    """
    if options.split:
        table.require(options.split)
        return options.split
    taken = {options.label, *options.apart, *options.columns}
    candidates = [name for name in table.names if name.lower() == SPLIT and name not in taken]
    known = TRAINING | TESTING
    return next((name for name in candidates if all(word.lower() in known for word in table.text(name))), "")


def training_and_test(table: DataTable, options: ReadOptions) -> tuple[DataTable, DataTable | None]:
    """Return the samples for training and those for testing as two tables; the second is None if no column marks them.

    Raises:
        ShardError: The column that marks them has other words than those for training and testing.
        SettingError: The column that the options name does not exist.
    """
    split = split_column(table, options)
    if not split:
        return table, None
    test_N = _testing(table, split)

    def taken(places: npt.NDArray[np.intp]) -> DataTable:
        return replace(table, cells={name: [cells[at] for at in places] for name, cells in table.cells.items()})

    return taken(np.flatnonzero(~test_N)), taken(np.flatnonzero(test_N))


def _testing(table: DataTable, split: str) -> Mask:
    words = [word.lower() for word in table.text(split)]
    strange = next((word for word in words if word not in TRAINING | TESTING), None)
    if strange is not None:
        raise ShardError(
            f"column {split!r} of {table.path} says {strange[:80]!r}; for every sample it must say one of "
            f"{', '.join(sorted(TRAINING | TESTING))}"
        )
    return np.array([word in TESTING for word in words])
