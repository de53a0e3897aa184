"""Tables: CSV files (a line with names, then a line for each sample) and Parquet. Columns hold numbers, labels or text."""

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
    """Return whether the file's name is that of a table."""
    return plain_suffix(path) in SUFFIXES


@dataclass(frozen=True)
class DataTable:
    """Columns of N cells each, in the file's order.

    Attributes:
        cells: The cells of every column by its name. A cell is text, a number, or None.
    """

    path: Path
    cells: Mapping[str, Sequence[Any]]

    @property
    def names(self) -> list[str]:
        return list(self.cells)

    def __len__(self) -> int:
        return len(next(iter(self.cells.values())))

    def require(self, *names: str) -> None:
        """Check that the table has columns of these names.

        Raises:
            SettingError: It has not. The message names all that it lacks, and suggests the nearest names.
        """
        lacking = [f"{name!r}{nearest(name, self.cells)}" for name in names if name not in self.cells]
        if lacking:
            raise SettingError(f"{self.path} has no column {', '.join(lacking)}")

    def label_column(self, given: str) -> str:
        """Return the name of the column with the classes: the given one, or else one called `y` or `label`.

        Raises:
            SettingError: There is no such column. The message says how to name one.
        """
        if given:
            self.require(given)
            return given
        usual = next((name for name in self.names if name.lower() in USUAL_LABELS), "")
        if not usual:
            more = ", ..." if len(self.names) > _SHOWN else ""
            raise SettingError(
                f"say --label: which column of {self.path} is the class ({', '.join(self.names[:_SHOWN])}{more})"
            )
        return usual

    def numbers(self, name: str) -> Array:
        """Return a column of numbers, (N,) float64; missing values are NaN.

        Raises:
            ShardError: A cell is not a number.
        """
        numbers = np.empty(len(self))
        for at, cell in enumerate(self.cells[name]):
            try:
                numbers[at] = math.nan if _is_gap(cell) else float(cell)
            except (TypeError, ValueError):
                raise ShardError(
                    f"column {name!r} of {self.path} holds {str(cell)[:80]!r} in sample {at + 1}, which is no number; "
                    f"leave it out with --apart {name}, or give a number to each of its values"
                ) from None
        return numbers

    def classes(self, name: str) -> Array:
        """Return a column of classes, (N,): numbers if every cell is one, else text.

        Raises:
            ShardError: A cell is empty.
        """
        cells = self.cells[name]
        empty = sum(cell is None or cell == "" for cell in cells)
        if empty:
            raise ShardError(f"{empty} samples of {self.path} have no class in the column {name!r}; leave them out")
        try:
            return np.array([float(cell) for cell in cells])
        except (TypeError, ValueError):
            return np.array([str(cell) for cell in cells])

    def names_in(self, name: str) -> Array:
        """Return a column with names of clients or groups, (N,).

        If all are whole numbers, they are returned as numbers, so that 10 comes after 9; otherwise as text.
        """
        try:
            return np.array([int(cell) for cell in self.cells[name]], dtype=np.int64)
        except (TypeError, ValueError, OverflowError):
            return np.array([str(cell) for cell in self.cells[name]])

    def text(self, name: str) -> list[str]:
        """Return a column as text without surrounding space; missing values are empty."""
        return ["" if cell is None else str(cell).strip() for cell in self.cells[name]]


def read_table(path: Path) -> DataTable:
    """Read the table at `path`; its suffix says in which form it is.

    Raises:
        ShardError: The file cannot be read, is too large, or is not a table.
        SettingError: The file is Parquet, and pyarrow is not installed.
    """
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
