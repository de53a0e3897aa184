"""Lines of a CSV file that two stray quotation marks join to one cell, so that rows would vanish without a word.

W columns.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

_NUMBER = re.compile(r"[-+]?[0-9.,]*[0-9][.,]?(e[-+]?[0-9]+)?", re.IGNORECASE)
_FEWEST = 4  # rows, with that of the names, from which columns are known
_SAMPLE = 1000  # rows by which columns are known
_FEW = 20  # a column of so few different values has no others


@dataclass(frozen=True)
class _KnownColumn:
    """Content of a column in the rows without line breaks."""

    has_words: bool
    few: frozenset[str]  # its values, if they are few

    def tells(self, cell: str) -> bool | None:
        """Return whether a cell can be of this column; None if the column can hold anything."""
        if self.few:
            return cell in self.few
        return None if self.has_words else not cell or _NUMBER.fullmatch(cell) is not None


def lost_rows(rows: Sequence[Sequence[str]], delimiter: str, first_line: int) -> str:
    """Return a note about lines within quotation marks that look like rows; empty if there are none.

    Args:
        rows: The cells of the file, with its line of names.
        delimiter: What lies between cells.
        first_line: Number of the line with the names.
    """
    width, columns = len(rows[0]), _known(rows) if len(rows) > _FEWEST else []
    line, first, last, count = first_line, 0, 0, 0
    for row in rows:
        breaks = sum(cell.count("\n") for cell in row)
        alike = sum(_looks_like_row(cells, width, columns) for cells in _inner(row, delimiter)) if breaks else 0
        if alike:
            first, last, count = first or line, line + breaks, count + alike
        line += 1 + breaks
    if not count:
        return ""
    return (
        f"{line - first_line - 1} lines below the names are only {len(rows) - 1} rows: quotation marks join lines {first} to "
        f"{last}, and {count} of the joined lines look like rows. If marks there are stray, remove them, or samples are lost"
    )


def _inner(row: Sequence[str], delimiter: str) -> Iterator[list[str]]:
    """Yield the cells that the lines within a row's cells would have as rows."""
    for place, cell in enumerate(row):
        _, *middle = cell.split("\n")
        yield from csv.reader(middle[:-1], delimiter=delimiter)
        if middle and place:
            end = next(csv.reader(middle[-1:], delimiter=delimiter), [])
            yield [*end, *row[place + 1 :]] if len(end) == place + 1 else []


def _looks_like_row(cells: Sequence[str], width: int, columns: Sequence[_KnownColumn]) -> bool:
    if len(cells) != width or not columns:
        return len(cells) == width > 2  # where hardly a row is left, by which columns were known
    answers = [column.tells(cell.strip()) for column, cell in zip(columns, cells, strict=True)]
    return True in answers and False not in answers


def _known(rows: Sequence[Sequence[str]]) -> list[_KnownColumn]:
    columns = []
    for place in range(len(rows[0])):
        cells = (row[place].strip() for row in islice(rows, 1, _SAMPLE) if place < len(row) and "\n" not in row[place])
        values = list(cells)
        different = set(values)
        few = frozenset(different) if len(different) <= min(_FEW, len(values) // 2) else frozenset[str]()
        columns.append(_KnownColumn(not all(not value or _NUMBER.fullmatch(value) for value in different), few))
    return columns
