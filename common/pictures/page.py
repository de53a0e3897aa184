"""Pictures and tables as files: one or more for each picture, and one self-contained HTML page."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from attune.common.errors import SettingError
from attune.common.estimate import with_estimate
from attune.common.pictures import figures
from attune.common.pictures.figures import Format

S = TypeVar("S")
Cell = str | int | float | None

LONG_ROWS = 15  # a longer table is folded up
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.2em; margin-top: 2.2em; border-bottom: 1px solid #ddd; }
img { max-width: 100%; height: auto; } p { max-width: 46em; }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums; }
th, td { padding: 0.15em 0.8em; text-align: right; border-bottom: 1px solid #eee; }
th:first-child, td:first-child { text-align: left; } th { border-bottom: 1px solid #888; }
summary { cursor: pointer; color: #3566a8; }
"""


@dataclass(frozen=True)
class PageTable:
    """Table of a page. Floats are shown with four digits, None as an empty cell."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Picture:
    """Picture of a page: a matplotlib figure, and the name of its file without the suffix."""

    name: str
    figure: Any

    @cached_property
    def png(self) -> bytes:
        """The picture as a PNG file."""
        return figures.png(self.figure)

    def file_of(self, form: Format) -> bytes:
        """Return the picture as a file of this form."""
        return self.png if form == "png" else figures.file_of(self.figure, form)


@dataclass(frozen=True)
class Section:
    """Section of a page: a caption with perhaps a picture and perhaps a table."""

    title: str
    caption: str
    picture: Picture | None = None
    table: PageTable | None = None


def drawn(pictures: Mapping[str, Callable[[S], Section]], source: S, wanted: Sequence[str]) -> tuple[list[Section], list[str]]:
    """Draw the pictures that are wanted, or without `wanted` all that are possible.

    Returns:
        The sections, and a line for each picture that is left out.

    Raises:
        SettingError: A wanted picture cannot be drawn.
    """
    sections, left_out = [], []
    for name in with_estimate(list(wanted or pictures), "pictures"):
        try:
            sections.append(pictures[name](source))
        except SettingError as error:
            if wanted:
                raise
            left_out.append(f"no picture {name!r}: {error}")
    return sections, left_out


def write(out: Path, title: str, sections: Iterable[Section], formats: Sequence[Format] = ("png",)) -> list[Path]:
    """Write each picture in these forms, and index.html with PNG pictures, into the folder `out`. Return their paths."""
    out.mkdir(parents=True, exist_ok=True)
    listed = list(sections)
    written = []
    for section in listed:
        if section.picture is not None:
            for form in formats:
                path = out / f"{section.picture.name}.{form}"
                path.write_bytes(section.picture.file_of(form))
                written.append(path)
    page = out / "index.html"
    page.write_text(render(title, listed), encoding="utf-8")
    return [*written, page]


def render(title: str, sections: Iterable[Section]) -> str:
    """Render the page with its pictures embedded, without scripts and without links to other places."""
    name = html.escape(title)
    head = f'<head>\n<meta charset="utf-8">\n<title>{name}</title>\n<style>{STYLE}</style>\n</head>'
    body = [f"<body>\n<h1>{name}</h1>", *map(_section, sections), "</body>"]
    return "\n".join(['<!DOCTYPE html>\n<html lang="en">', head, *body, "</html>\n"])


def _section(section: Section) -> str:
    parts = [f"<h2>{html.escape(section.title)}</h2>", f"<p>{html.escape(section.caption)}</p>"]
    if section.picture is not None:
        data = base64.b64encode(section.picture.png).decode("ascii")
        parts.append(f'<img alt="{html.escape(section.title)}" src="data:image/png;base64,{data}">')
    if section.table is not None:
        table = _table(section.table)
        rows = len(section.table.rows)
        parts.append(f"<details><summary>the numbers ({rows} rows)</summary>{table}</details>" if rows > LONG_ROWS else table)
    return "\n".join(parts)


def _table(table: PageTable) -> str:
    heads = "".join(f"<th>{html.escape(head)}</th>" for head in table.heads)
    rows = "\n".join(f"<tr>{''.join(f'<td>{_cell(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    return f"<table>\n<tr>{heads}</tr>\n{rows}\n</table>"


def _cell(cell: Cell) -> str:
    if cell is None:
        return ""
    return f"{cell:.4f}" if isinstance(cell, float) else html.escape(str(cell))
