"""CSV files of results, to which rows are added as they are measured. No torch is needed."""

from __future__ import annotations

import csv
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Results:
    """Table that knows its finished runs. Rows may be written from several threads."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._path, self._columns, self._lock = path, columns, threading.Lock()

    def __repr__(self) -> str:
        return f"Results({self._path})"

    def rows(self) -> list[dict[str, str]]:
        if not self._path.exists():
            return []
        with self._path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        with self._lock, table(self._path, self._columns, append=True) as write:
            for row in rows:
                write(row)

    def fill(self, key: Mapping[str, str], cells: Mapping[str, Any]) -> None:
        """Fill empty cells of the rows with this key. A new file replaces the old one."""
        made = self._path.with_suffix(".new")
        with self._lock, table(made, self._columns) as write:
            for row in self.rows():
                left = {name: value for name, value in cells.items() if row[name] == ""}
                write(row | left if key.items() <= row.items() else row)
        made.replace(self._path)


@contextmanager
def table(out: Path | None, columns: Sequence[str], *, append: bool = False) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Write rows as they come. Without `out` this is a no-op."""
    goes_on = append and out is not None and out.exists()
    with (out or Path(os.devnull)).open("a" if append else "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        if not goes_on:
            writer.writeheader()

        def write(row: dict[str, Any]) -> None:
            writer.writerow(row)
            file.flush()

        yield write
