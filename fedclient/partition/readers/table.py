"""CSV and its like: one sample a line, a head line, numbers as features, one column for the class, others set apart."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from attune.common.errors import SettingError, ShardError, nearest
from attune.fedclient.data.arrays import Array
from attune.fedclient.partition.readers.assemble import Raw
from attune.fedclient.partition.readers.files import plain_suffix, read_text
from attune.fedclient.partition.readers.options import ReadOptions

_GAPS = {"", "?", "na", "nan", "null"}
_SUFFIXES = (".csv", ".tsv")
_MAX_CELLS = 1 << 28
_SHOWN = 8


def recognises(path: Path) -> bool:
    return path.is_file() and plain_suffix(path) in _SUFFIXES


def read(path: Path, options: ReadOptions) -> Raw:
    """The class is the column --label names (default: `y` or `label`); columns that are named as the client or group,
    or by --apart, become label arrays, all others must be numbers. Empty cells, `?`, `NA` and `nan` are missing values.

    Errors: ShardError, SettingError for columns that are not there.
    """
    text = read_text(path)
    head = text.partition("\n")[0]
    delimiter = max("\t,;", key=head.count)
    rows = csv.reader(io.StringIO(text), delimiter=delimiter)
    try:
        columns = [name.strip() for name in next(rows, [])]
        label, apart = _roles(path, columns, options)
        cells = _columns(path, columns, rows)
    except csv.Error as error:
        raise ShardError(f"{path} is not a table: {error}") from None
    features = [name for name in columns if name != label and name not in apart]
    if not features:
        raise ShardError(f"{path} has no column left for features beside {', '.join([label, *apart])}")
    x = np.column_stack([_numbers(path, name, cells[name]) for name in features]).astype(np.float32)
    if "" in cells[label]:
        raise ShardError(
            f"{cells[label].count('')} samples of {path} have nothing in the class's column {label!r}; leave them out"
        )
    y = np.array(cells[label])
    as_numbers = _maybe_numbers(cells[label])
    more = {name: _label_array(cells[name]) for name in apart}
    return Raw(path.name.partition(".")[0], (x, y if as_numbers is None else as_numbers), more=more)


def _roles(path: Path, columns: list[str], options: ReadOptions) -> tuple[str, list[str]]:
    if not columns or len(set(columns)) < len(columns) or not all(columns):
        raise ShardError(f"the first line of {path} must name every column, each differently; it says {columns[:_SHOWN]}")
    for name in (*options.apart, *([options.label] if options.label else [])):
        if name not in columns:
            raise SettingError(f"{path} has no column {name!r}{nearest(name, columns)}")
    label = options.label or next((name for name in columns if name.lower() in ("y", "label")), "")
    if not label:
        raise SettingError(f"say --label: which column of {path} is the class ({', '.join(columns[:_SHOWN])}, ...)")
    return label, [name for name in dict.fromkeys(options.apart) if name != label]


def _columns(path: Path, columns: list[str], rows: Iterator[list[str]]) -> dict[str, list[str]]:
    table = [row for row in islice(rows, _MAX_CELLS // len(columns) + 1) if row]
    if len(table) > _MAX_CELLS // len(columns):
        raise ShardError(f"{path} has more than {_MAX_CELLS} cells, the limit; save it as an .npz")
    for number, row in enumerate(table):
        if len(row) != len(columns):
            raise ShardError(f"sample {number + 1} of {path} has {len(row)} cells, the first line names {len(columns)} columns")
    if not table:
        raise ShardError(f"{path} holds no samples, only a first line")
    return {name: [row[place].strip() for row in table] for place, name in enumerate(columns)}


def _numbers(path: Path, name: str, cells: list[str]) -> Array:
    found = []
    for number, cell in enumerate(cells):
        try:
            found.append(math.nan if cell.lower() in _GAPS else float(cell))
        except ValueError:
            raise ShardError(
                f"column {name!r} of {path} holds {cell!r} in sample {number + 1}, which is no number; "
                f"leave it out with --apart {name}, or give a number to each of its values"
            ) from None
    return np.array(found)


def _maybe_numbers(cells: list[str]) -> Array | None:
    try:
        return np.array([float(cell) for cell in cells])
    except ValueError:
        return None


def _label_array(cells: list[str]) -> Array:
    """Whole numbers as such, so that client 10 comes after client 9; anything else as text."""
    try:
        return np.array([int(cell) for cell in cells], dtype=np.int64)
    except (ValueError, OverflowError):
        return np.array(cells)
