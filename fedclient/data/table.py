"""Tables: CSV files (a line with names, then a line for each sample), Parquet, Excel, and queries of databases.

N samples, F columns. What a cell is: fedclient.data.cells.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from attune.common.classes import normal
from attune.common.errors import SettingError, ShardError, nearest
from attune.fedclient.data import cells as cell_rules
from attune.fedclient.data.arrays import Array, plain_suffix
from attune.fedclient.data.binary_tables import read_excel, read_parquet
from attune.fedclient.data.cells import REMEDY, WORDS, Words, is_missing
from attune.fedclient.data.csv_file import TableContent, read_csv
from attune.fedclient.data.sql_query import read_sql

CSV_SUFFIXES = (".csv", ".tsv")
_READERS: dict[str, Callable[[Path], TableContent]] = {".parquet": read_parquet, ".xlsx": read_excel, ".sql": read_sql}
SUFFIXES = (*CSV_SUFFIXES, *_READERS)
PERHAPS = (".txt", ".tab", ".dat")  # suffixes that tables have too
USUAL_LABELS = ("y", "label")
_SHOWN = 8
_LISTED = 40  # columns that an error names


def is_table(path: Path) -> bool:
    """Return whether the file's name is that of a table."""
    return plain_suffix(path) in SUFFIXES


def may_be_table(path: Path) -> bool:
    """Return whether the file's name is that of a table, or of a text that can be one."""
    return plain_suffix(path) in (*SUFFIXES, *PERHAPS)


@dataclass(frozen=True)
class DataTable:
    """Columns of N cells each, in the file's order.

    Attributes:
        cells: The cells of every column by its name. A cell is text, a number, or None.
        words: Words that mean a missing value.
        index: Columns that only number the rows: no features unless the user names them.
        notes: Columns and rows that were left out, with the reason.
    """

    path: Path
    cells: Mapping[str, Sequence[Any]]
    words: Words = WORDS
    index: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

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
            raise SettingError("; ".join([f"{self.path} has no column {', '.join(lacking)}", *self.notes]))

    def label_column(self, given: str) -> str:
        """Return the name of the column with the classes: the given one, or else one called `y` or `label`.

        Raises:
            SettingError: There is no such column. The message says how to name one.
        """
        if given:
            self.require(given)
            return given
        usual = [name for name in self.names if name.lower() in USUAL_LABELS]
        if len(usual) > 1:
            raise SettingError(f"say --label: the class of {self.path} can be in {' and '.join(map(repr, usual))}")
        if not usual:
            more = ", ..." if len(self.names) > _SHOWN else ""
            raise SettingError(
                f"say --label: which column of {self.path} is the class ({', '.join(self.names[:_SHOWN])}{more})"
            )
        return usual[0]

    def numbers(self, *names: str) -> npt.NDArray[np.float64]:
        """Return columns of numbers, (N, F); missing values are NaN.

        Raises:
            ShardError: Cells are no numbers. The message names every column that has such a cell, and what to do.
        """
        columns, wrong = self._parsed(names, cell_rules.number_of)
        if commas := [one for one in wrong if cell_rules.has_decimal_comma(one[2])]:
            raise ShardError(f"{_columns_with(commas)} of {self.path} {cell_rules.COMMAS}")
        if wrong:
            apart = " ".join(f"--apart {_quoted(name)}" for name, _, _ in wrong[:_LISTED])
            raise ShardError(
                f"{_columns_with(wrong)} of {self.path}: text, dates or names are no numbers. Say --schema auto "
                f"(docs/tables.md), leave out with {apart}, or give each value a number. If such a cell stands for a missing "
                "value, --missing-words usual,WORD says so"
            )
        return columns

    def outcomes(self, names: Sequence[str], flags: Collection[str], what: str) -> npt.NDArray[np.float64]:
        """Return columns to be predicted, (N, K), without missing values.

        Args:
            names: The columns.
            flags: Those that say yes or no.
            what: Meaning of the flags in messages.

        Raises:
            ShardError: A cell is missing, no number, or no word for yes or no.
        """
        self.check_complete(names, "to be predicted")
        columns = []
        for name in names:
            column, wrong = self._parsed([name], cell_rules.flag_of if name in flags else cell_rules.number_of)
            if wrong and cell_rules.has_decimal_comma(wrong[0][2]):
                raise ShardError(f"{_columns_with(wrong)} of {self.path} {cell_rules.COMMAS}")
            if wrong:
                needs = f"{what}: write 0 for no and 1 for yes, or their words" if name in flags else "a number"
                raise ShardError(
                    f"{_columns_with(wrong)} of {self.path} is to be predicted, and each cell must be {needs}. "
                    f"{_mapped(*wrong[0])}"
                )
            columns.append(column)
        return np.concatenate(columns, axis=1)

    def _parsed(
        self, names: Sequence[str], parse: Callable[[Any], float]
    ) -> tuple[npt.NDArray[np.float64], list[tuple[str, int, Any]]]:
        """Return columns as numbers, (N, F), with NaN for missing values, and the first cell of each that cannot be parsed."""
        x, wrong = np.full((len(self), len(names)), np.nan), []
        for place, name in enumerate(names):
            for at, cell in enumerate(self.cells[name]):
                if is_missing(cell, self.words):
                    continue
                try:
                    x[at, place] = parse(cell)
                except ValueError:
                    wrong.append((name, at, cell))
                    break
        return x, wrong

    def missing_in(self, *names: str) -> npt.NDArray[np.bool_]:
        """Return which samples lack a value in one of the columns, (N,)."""
        return np.array([any(is_missing(self.cells[name][at], self.words) for name in names) for at in range(len(self))])

    def check_complete(self, names: Sequence[str], what: str) -> None:
        """Check that every sample has a value in the columns.

        Raises:
            ShardError: Some have not. The message names the cells, and the option.
        """
        lacking = self.missing_in(*names)
        if count := int(lacking.sum()):
            first = int(np.flatnonzero(lacking)[0])
            said = ", ".join(
                sorted({repr(self.cells[name][at]) for at in np.flatnonzero(lacking).tolist() for name in names})[:_SHOWN]
            )
            raise ShardError(
                f"{count} samples of {self.path} have nothing in the column {', '.join(map(repr, names))}, which is {what}: it "
                f"holds {said}, first in sample {first + 1}. Leave these samples out; if it is a value, {REMEDY}"
            )

    def labels(self, name: str, what: str = "the class") -> Array:
        """Return a column of classes, groups or keys, (N,): int64 if every cell is an integer, else text.

        Raises:
            ShardError: A cell is missing, or can be no label.
        """
        self.check_complete([name], what)
        return self.names_in(name)

    def names_in(self, name: str) -> Array:
        """Return a column as `labels` does, with an empty text for a missing value.

        Raises:
            ShardError: A cell can be no label.
        """
        try:
            return cell_rules.labels_of(["" if is_missing(cell, self.words) else cell for cell in self.cells[name]])
        except ValueError as error:
            reason, at = error.args
            raise ShardError(f"column {name!r} of {self.path} holds {reason} (sample {at + 1})") from None

    def above(self, name: str, threshold: float) -> Array:
        """Return which samples have a number above the threshold in a column, (N,) int64.

        Raises:
            ShardError: A cell is missing.
            SettingError: A cell is no number.
        """
        self.check_complete([name], "compared with a number")
        above = np.zeros(len(self), dtype=np.int64)
        for at, cell in enumerate(self.cells[name]):
            try:
                above[at] = cell_rules.exact_number(cell) > threshold
            except ValueError:
                raise SettingError(
                    f"--label has a number to compare with, but {name} of {self.path} is text, such as {str(cell)[:40]!r} in "
                    f"sample {at + 1}. {_mapped(name, at, cell)}"
                ) from None
        return above

    def text(self, name: str) -> list[str]:
        """Return a column as text without surrounding space; missing values are empty."""
        return ["" if cell is None else normal(str(cell)) for cell in self.cells[name]]


def read_table(path: Path, words: Words = WORDS) -> DataTable:
    """Read the table at `path`; its suffix says in which form it is.

    Args:
        path: The file.
        words: Words that mean a missing value.

    Raises:
        ShardError: The file cannot be read, is too large, or is not a table.
        SettingError: The package that reads it is not installed, or a query does not say where the database is.
    """
    content = _READERS.get(plain_suffix(path), read_csv)(path)
    return DataTable(path, content.cells, words, content.index, content.notes)


def _columns_with(wrong: Sequence[tuple[str, int, Any]]) -> str:
    listed = ", ".join(f"{name!r} ({str(cell)[:40]!r} in sample {at + 1})" for name, at, cell in wrong[:_LISTED])
    more = f" and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
    return f"{'columns' if len(wrong) > 1 else 'column'} {listed}{more}"


def _mapped(name: str, _at: int, cell: Any) -> str:
    """Return what helps where a cell that is to be predicted is in words."""
    return f"Map such words (--map '{name}:{str(cell)[:40]}=NUMBER'), correct the cells, or leave those samples out"


def _quoted(name: str) -> str:
    return f"'{name}'" if not name.replace("_", "").isalnum() else name
