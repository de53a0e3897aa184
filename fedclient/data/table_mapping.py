"""Mapping of a site's table to the words of its federation: names of columns, values, and the decimal comma.

It is applied before anything is made of the table, so no name or spelling of the site leaves it.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from attune.common.errors import SettingError, nearest
from attune.common.text import listed
from attune.fedclient.data.arrays import plain_suffix
from attune.fedclient.data.cells import WORDS, Words, has_decimal_comma, words_of, written
from attune.fedclient.data.csv_file import plain_name
from attune.fedclient.data.table import CSV_SUFFIXES, PERHAPS, DataTable, read_table
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
        if unused := [word for word in words if word not in map(_key, table.cells[_before(column, names)])]:
            notes.append(f"--map: no cell of {column} is {listed(unused)}")
    index = tuple(names.get(name, name) for name in table.index)
    return replace(table, cells=cells, index=index, notes=tuple(notes))


def _before(column: str, names: Mapping[str, str]) -> str:
    return next((before for before, after in names.items() if after == column), column)


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
