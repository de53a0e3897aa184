"""Tables: CSV and its like (one sample a line, a head line), and Parquet. Columns by name, as numbers or as labels."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from attune.common.errors import SettingError, ShardError, nearest
from attune.fedclient.data.arrays import Array
from attune.fedclient.data.files import MAX_BINARY_BYTES, plain_suffix, read_text

CSV_SUFFIXES = (".csv", ".tsv")
SUFFIXES = (*CSV_SUFFIXES, ".parquet")
USUAL_LABELS = ("y", "label")
MAX_CELLS = 1 << 28
_GAPS = {"", "?", "na", "nan", "null"}
_SHOWN = 8


def is_table(path: Path) -> bool:
    """By its name alone."""
    return plain_suffix(path) in SUFFIXES


@dataclass(frozen=True)
class DataTable:
    """Columns of N cells by name, in the file's order. A cell is text, a number, or None."""

    path: Path
    cells: Mapping[str, Sequence[Any]]

    @property
    def names(self) -> list[str]:
        return list(self.cells)

    def __len__(self) -> int:
        return len(next(iter(self.cells.values())))

    def require(self, name: str) -> None:
        """Errors: SettingError with the nearest name for a column that is not there."""
        if name not in self.cells:
            raise SettingError(f"{self.path} has no column {name!r}{nearest(name, self.cells)}")

    def label_column(self, given: str) -> str:
        """The column of the classes: the given one, else one called `y` or `label`. Errors: SettingError that says how."""
        if given:
            self.require(given)
            return given
        found = next((name for name in self.names if name.lower() in USUAL_LABELS), "")
        if not found:
            more = ", ..." if len(self.names) > _SHOWN else ""
            raise SettingError(
                f"say --label: which column of {self.path} is the class ({', '.join(self.names[:_SHOWN])}{more})"
            )
        return found

    def numbers(self, name: str) -> Array:
        """(N,) float64; missing values are NaN. Errors: ShardError for a cell that is no number."""
        found = np.empty(len(self))
        for at, cell in enumerate(self.cells[name]):
            try:
                found[at] = math.nan if _is_gap(cell) else float(cell)
            except (TypeError, ValueError):
                raise ShardError(
                    f"column {name!r} of {self.path} holds {str(cell)[:80]!r} in sample {at + 1}, which is no number; "
                    f"leave it out with --apart {name}, or give a number to each of its values"
                ) from None
        return found

    def classes(self, name: str) -> Array:
        """(N,) numbers if every cell is one, else text. Errors: ShardError for cells with nothing in them."""
        cells = self.cells[name]
        empty = sum(cell is None or cell == "" for cell in cells)
        if empty:
            raise ShardError(f"{empty} samples of {self.path} have nothing in the class's column {name!r}; leave them out")
        try:
            return np.array([float(cell) for cell in cells])
        except (TypeError, ValueError):
            return np.array([str(cell) for cell in cells])

    def names_in(self, name: str) -> Array:
        """(N,) of what names a client or a group: whole numbers as such, so that 10 comes after 9; anything else as text."""
        try:
            return np.array([int(cell) for cell in self.cells[name]], dtype=np.int64)
        except (TypeError, ValueError, OverflowError):
            return np.array([str(cell) for cell in self.cells[name]])

    def text(self, name: str) -> list[str]:
        """The cells as text, without space around; what is missing is empty."""
        return ["" if cell is None else str(cell).strip() for cell in self.cells[name]]


def read_table(path: Path) -> DataTable:
    """The table at `path`, by its suffix. Errors: ShardError; SettingError where Parquet cannot be read for want of pyarrow."""
    return _read_parquet(path) if plain_suffix(path) == ".parquet" else _read_csv(path)


def _is_gap(cell: Any) -> bool:
    return cell is None or (isinstance(cell, str) and cell.lower() in _GAPS)


def _read_csv(path: Path) -> DataTable:
    text = read_text(path)
    head = text.partition("\n")[0]
    delimiter = max("\t,;", key=head.count)
    rows = csv.reader(io.StringIO(text), delimiter=delimiter)
    try:
        columns = [name.strip() for name in next(rows, [])]
        _check_names(path, columns)
        return DataTable(path, _cells(path, columns, rows))
    except csv.Error as error:
        raise ShardError(f"{path} is not a table: {error}") from None


def _check_names(path: Path, columns: list[str]) -> None:
    if not columns or len(set(columns)) < len(columns) or not all(columns):
        raise ShardError(f"the first line of {path} must name every column, each differently; it says {columns[:_SHOWN]}")


def _cells(path: Path, columns: list[str], rows: Iterator[list[str]]) -> dict[str, list[str]]:
    table = [row for row in islice(rows, MAX_CELLS // len(columns) + 1) if row]
    _check_size(path, len(table), len(columns))
    for number, row in enumerate(table):
        if len(row) != len(columns):
            raise ShardError(f"sample {number + 1} of {path} has {len(row)} cells, the first line names {len(columns)} columns")
    return {name: [row[place].strip() for row in table] for place, name in enumerate(columns)}


def _check_size(path: Path, rows: int, columns: int) -> None:
    if rows > MAX_CELLS // columns:
        raise ShardError(f"{path} has more than {MAX_CELLS} cells, the limit; save it as an .npz")
    if not rows:
        raise ShardError(f"{path} holds no samples, only names of columns")


def _read_parquet(path: Path) -> DataTable:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise SettingError(f"{path} is Parquet, which pyarrow reads: pip install 'attune-fl[tables]'") from None
    try:
        if path.stat().st_size > MAX_BINARY_BYTES:
            raise ShardError(f"{path} holds more than {MAX_BINARY_BYTES >> 30} GiB, the limit; cut it into smaller files")
        with parquet.ParquetFile(path) as file:
            _check_names(path, file.schema_arrow.names)
            _check_size(path, file.metadata.num_rows, file.metadata.num_columns)
            read = file.read()
    except (OSError, pyarrow.ArrowException) as error:
        raise ShardError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    return DataTable(path, {name: read.column(name).to_pylist() for name in read.column_names})
