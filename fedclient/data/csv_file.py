"""Reading of CSV files as spreadsheets and programs write them: a line with names, then a line for each sample.

Two stray quotation marks can join lines to one cell; they are noticed, or rows would vanish without a word. W columns.
"""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from attune.common.errors import ShardError
from attune.fedclient.data.arrays import read_text
from attune.fedclient.data.cells import written

MAX_CELLS = 1 << 28
_DELIMITERS = "\t;,|"
_SEP = re.compile(r'"?sep=(.)"?', re.IGNORECASE)
_LEADING = re.compile(r"\A(?:[ \t;,|]*\n)+")  # lines without a cell before the names
_QUOTED = re.compile(r'"[^"]*"')
_UNNAMED = re.compile(r"unnamed: 0(\.[0-9]+)?|__index_level_[0-9]+__|index", re.IGNORECASE)
_FORMULA = re.compile(r'\s*="([^"]*)"\s*')  # how spreadsheet programs keep 0117 as text
_BLANK = ' \t;,|"'
_LETTER = re.compile(r"[^\W\d_]")
_SHOWN = 8
_LINES, _FEW_LINES = 50, 3  # of a text: those that are looked at, and the fewest that make a table


@dataclass(frozen=True)
class TableContent:
    """Content of a table's file.

    Attributes:
        cells: The cells of every column by its name.
        index: Columns that only number the rows: no features unless the user names them.
        notes: Columns and rows that were left out, with the reason.
    """

    cells: Mapping[str, Sequence[Any]]
    index: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass
class _Rows:
    """Rows of a file while it is read."""

    names: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)


def read_csv(path: Path) -> TableContent:
    """Read a CSV file. Tabs, semicolons, commas or bars lie between its cells.

    Raises:
        ShardError: The file cannot be read, is too large, or is not a table.
    """
    whole = read_text(path, strict=True)
    text = _LEADING.sub("", whole)
    said = _SEP.fullmatch(text.partition("\n")[0].strip())
    if said:
        text = text.partition("\n")[2]
    first_line = whole.count("\n") - text.count("\n") + 1
    return _content_of(path, text, said[1] if said else _delimiter(text), first_line)


def content_of_rows(path: Path, rows: Iterable[Sequence[Any]]) -> TableContent:
    """Return the content of a table whose cells are Python values, by the rules for CSV files.

    Args:
        path: Name of the table in messages.
        rows: The names of the columns, then the samples. None is an empty cell.

    Raises:
        ShardError: It is too large, or not a table.
    """
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(["" if cell is None else written(cell) for cell in row] for row in rows)
    return _content_of(path, _LEADING.sub("", text.getvalue()), ",")


def _content_of(path: Path, text: str, delimiter: str, first_line: int = 0) -> TableContent:
    """Return the content of a text. `first_line` is the number of its first line in the file; 0: it is from no file."""
    if not text.strip():
        raise ShardError(f"{path} is empty; the first line must name every column, and each sample needs a line")
    _check_no_title(path, text, delimiter)
    lines: list[list[str]] = []
    try:
        for line in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True):
            lines.append(line)  # an error leaves the lines before it
    except csv.Error as error:
        begins = first_line + len(lines) + sum(cell.count("\n") for line in lines for cell in line)
        raise ShardError(
            f"{path} is not a table: {error} in the row that begins in line {begins}; look there for a quotation mark that is "
            "never closed"
        ) from None
    table = _Rows([plain_name(name) for name in lines[0]], lines[1:])
    if first_line and len(lines) < text.count("\n") + (not text.endswith("\n")):
        table.notes += filter(None, [lost_rows(lines, delimiter, first_line)])
    _drop_end(table)
    _drop_blank_lines(table)
    check_size(path, len(table.rows), len(table.names))
    index = _name_the_index(path, table)
    check_names(path, table.names)
    _check_widths(path, table)
    if '="' in text:
        table.rows = [[match[1] if (match := _FORMULA.fullmatch(cell)) else cell for cell in row] for row in table.rows]
    cells = {name: [row[place].strip() for row in table.rows] for place, name in enumerate(table.names)}
    index += tuple(name for name in table.names if name not in index and is_index(name, cells[name]))
    return TableContent(cells, index, tuple(table.notes))


def looks_like_table(text: str) -> bool:
    """Return whether every line has the same number of cells, at least two. Prose has not, nor has a text of few lines."""
    lines = [_QUOTED.sub("", line) for line in text.split("\n", _LINES)[:_LINES] if line.strip()]
    return len(lines) >= _FEW_LINES and any(
        len({line.count(mark) for line in lines}) == 1 and mark in lines[0] for mark in _DELIMITERS
    )


def plain_name(name: str) -> str:
    """Return the name of a column in one line, in the Unicode form NFC, with single spaces."""
    return " ".join(unicodedata.normalize("NFC", name).split())


def check_names(path: Path, names: Sequence[str]) -> None:
    """Check that every column has a name of its own that can be printed.

    Raises:
        ShardError: One has not.
    """
    if not any(names):
        raise ShardError(f"the first line of {path} must name the columns, and it names none")
    for place, name in enumerate(names, 1):
        if not name:
            raise ShardError(
                f"column {place} of {path} has no name in the first line, which says {list(names)[:_SHOWN]}: name it"
            )
        if not name.isprintable():
            raise ShardError(
                f"the name of column {place} of {path}, {name!r}, has characters that cannot be printed: rename it"
            )
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        listed = ", ".join(map(repr, twice[:_SHOWN]))
        raise ShardError(f"the first line of {path} must name every column, each differently; several are called {listed}")


def check_size(path: Path, rows: int, columns: int) -> None:
    """Check that a table has samples, and not too many cells.

    Raises:
        ShardError: It has not.
    """
    if rows > MAX_CELLS // max(1, columns):
        raise ShardError(f"{path} has more than {MAX_CELLS} cells, the limit; save it as an .npz")
    if not rows:
        raise ShardError(f"{path} holds no samples, only names of columns")


def is_index(name: str, cells: Sequence[Any]) -> bool:
    """Return whether a column is the index that pandas writes: it has the usual name, and all its values differ."""
    return _UNNAMED.fullmatch(name) is not None and len(cells) > 1 and len(set(map(str, cells))) == len(cells)


def _delimiter(text: str) -> str:
    """Return the delimiter by which the first line and the second one have the same number of cells, and the most."""
    plain = _QUOTED.sub("", text[: 1 << 20]).split("\n")
    head, second = plain[0], plain[1] if len(plain) > 1 else ""
    return max(_DELIMITERS, key=lambda mark: (head.count(mark) == second.count(mark) and mark in head, head.count(mark)))


def _check_no_title(path: Path, text: str, delimiter: str) -> None:
    """Check that the first line is no title of the table, as programs write it above the names of the columns.

    Raises:
        ShardError: It has one cell, and a line after it names several columns that the lines below have.
    """
    lines = [line for line in text.split("\n", _LINES)[:_LINES] if line.strip(_BLANK)]
    with suppress(csv.Error):
        first, second = [*csv.reader(lines[:2], delimiter=delimiter), [], []][:2]
        if len(first) == len(second) > 1 and all(map(str.strip, first)):
            return  # other marks between cells can be decimal commas
    for mark in _DELIMITERS:
        try:
            rows = [[cell.strip() for cell in row] for row in csv.reader(lines, delimiter=mark)]
        except csv.Error:
            return  # read_csv says what is wrong
        filled = [sum(map(bool, row)) for row in rows]
        head = next((at for at, row in enumerate(rows) if filled[at] == len(row) == max(filled) > 1), 0)
        if not head or filled[0] > 1 or len(rows) <= head + 1 or any(len(row) != filled[head] for row in rows[head:]):
            continue
        names = rows[head]
        if len(set(names)) == len(names) and all(map(_LETTER.search, names)):
            raise ShardError(
                f"the first line of {path} seems to be a title, {lines[0][:80]!r}, and the columns to be called "
                f"{', '.join(map(repr, names[:_SHOWN]))}: remove the line{'s' if head > 1 else ''} above these names"
            )


def _drop_end(table: _Rows) -> None:
    """Drop columns at the end that have neither a name nor a cell, as a delimiter at the end of every line makes them."""
    width = max(place for place, name in enumerate(["", *table.names]) if name or not place)
    if any(cell.strip() for row in table.rows for cell in row[width:]):
        return
    widest = max([len(table.names), *map(len, table.rows)])
    if width and widest > width:
        table.names = table.names[:width]
        table.rows = [row[:width] for row in table.rows]
        table.notes.append("left out: a column without name and cells at the end of the lines")


def _drop_blank_lines(table: _Rows) -> None:
    """Drop lines without a cell, and those with empty cells alone at the end. A table of one column keeps those between."""
    count = len(table.rows)
    while table.rows and not any(cell.strip() for cell in table.rows[-1]):
        table.rows.pop()
    if len(table.names) > 1:
        table.rows = [row for row in table.rows if len(row) > 1 or any(cell.strip() for cell in row)]
    else:
        table.rows = [row or [""] for row in table.rows]
    if dropped := count - len(table.rows):
        table.notes.append(f"left out: {dropped} {'lines' if dropped > 1 else 'line'} without any cell")


def _name_the_index(path: Path, table: _Rows) -> tuple[str, ...]:
    """Name a first column without a name, which is an index if all its values differ; return the names of such columns.

    Raises:
        ShardError: Values of the nameless first column are repeated.
    """
    widths = {len(row) for row in table.rows}
    if table.names[0] and widths == {len(table.names) + 1} and len({row[0] for row in table.rows}) == len(table.rows) > 1:
        table.names.insert(0, "")  # R and pandas name one column less than there are
    if table.names[0] or len(table.names) < 2:
        return ()
    values = [row[0] for row in table.rows if row]
    if len(set(values)) < len(values):
        raise ShardError(f"the first column of {path} has no name, and is no index, since values are repeated: name it")
    name = "index" if "index" not in table.names else "index (no name)"
    table.names[0] = name
    return (name,)


def _check_widths(path: Path, table: _Rows) -> None:
    for number, row in enumerate(table.rows, 1):
        if len(row) != len(table.names):
            raise ShardError(
                f"sample {number} of {path} has {len(row)} cells, the first line names {len(table.names)} columns; a cell that "
                "holds the character between cells needs quotation marks"
            )


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
