"""Figures as the bytes of files, the colours that all pictures share, and one self-contained HTML page with their numbers.

matplotlib is imported only when a figure is made.
"""

from __future__ import annotations

import base64
import html
import io
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from attune.common.errors import SettingError
from attune.common.estimate import with_estimate
from attune.common.statistics import interval_of
from attune.common.task import SCORED, ScoredTask

DPI = 120
RING = 1.5  # size of a mark beside the one that lies on it
Format = Literal["png", "pdf", "svg"]
_UNDATED: dict[Format, dict[str, None]] = {"png": {"Software": None}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}
COLOURS = ("#3566a8", "#e08214", "#4d9c4a", "#b3478f", "#7f7f7f", "#17a2b8", "#8c564b", "#d4b106", "#d62728", "#5e3c99")
BEFORE, AFTER, COMMON, LOCAL, ALONE, KEPT = COLOURS[0], COLOURS[1], COLOURS[4], COLOURS[2], COLOURS[6], COLOURS[3]


def new(width: float, height: float, arranged: bool = True) -> Any:
    """Make an empty matplotlib Figure of `width` by `height` inches; `arranged`: matplotlib makes room for the labels.

    Raises:
        SettingError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise SettingError("pictures need matplotlib, which is not installed: pip install 'attune-fl[data]'") from None
    figure = Figure(figsize=(width, height), layout="constrained" if arranged else None)
    FigureCanvasAgg(figure)
    return figure


def grid(rows: int, columns: int, count: int, width: float, height: float) -> tuple[Any, Any]:
    """Make a figure of this size with a grid of axes, of which the first `count` are seen.

    Raises:
        SettingError: matplotlib is not installed.
    """
    figure = new(width, height)
    axes: Any = figure.subplots(rows, columns, squeeze=False)
    for empty in axes.flat[count:]:
        empty.set_visible(False)
    return figure, axes


def file_of(figure: Any, form: Format = "png") -> bytes:
    """Return the figure as a file of this form; the same figure gives the same bytes.

    Letters that the font lacks, as in some names of devices, are drawn as boxes, without a warning for each.
    """
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": "attune"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font")
        figure.savefig(buffer, format=form, dpi=DPI, metadata=_UNDATED[form])
    return buffer.getvalue()


def ringed(values: Sequence[Sequence[float | None]], size: float) -> list[float]:
    """Return a size of marks for each series, so that marks of several series at one place stay visible as rings.

    Args:
        values: The values of each series at the same places, None where it has none. Later series are drawn over earlier ones.
        size: Size of marks that lie alone.
    """
    sizes = [size] * len(values)
    for first in range(len(values) - 2, -1, -1):
        over = [
            sizes[later]
            for later in range(first + 1, len(values))
            if any(a is not None and a == b for a, b in zip(values[first], values[later], strict=True))
        ]
        sizes[first] = max([size, *(covering * RING for covering in over)])
    return sizes


def legend_above(axes: Any, title: str, columns: int = 3) -> None:
    """Set a title, and below it, above the drawing and not over it, the legend of all that has a label."""
    lines = -(-len(axes.get_legend_handles_labels()[1]) // columns)
    axes.set_title(title, pad=8 + 15 * lines)
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=columns, borderaxespad=0.1, fontsize=9)


def plain(axes: Any, grid: str | None = "y") -> None:
    """Remove the frame above and on the right, and put a light grid behind the drawing."""
    axes.spines[["top", "right"]].set_visible(False)
    if grid:
        axes.grid(axis=grid, color="0.9", linewidth=0.8)
        axes.set_axisbelow(True)


def natural(names: Iterable[str]) -> list[str]:
    """Sort names with numbers by their value: shard2 before shard10."""

    def key(name: str) -> list[tuple[bool, int, str]]:
        return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]

    return sorted(names, key=key)


def short(names: Sequence[str]) -> list[str]:
    """Shorten names: leave out the words, up to a hyphen or underscore, with which all of them begin."""
    common = os.path.commonprefix(list(names)) if len(names) > 1 else ""  # noqa: RUF071 (by character is meant)
    cut = max(common.rfind("-"), common.rfind("_")) + 1
    return [name[cut:] or name for name in names]


def score_axis(axes: Any, task: ScoredTask, more: str = "", top: float = 1.02) -> None:
    """Label the y axis and set its limits: from 0 (or below it for R2) to the best score. Call it after the drawing."""
    axes.set_ylim(min(0.0, axes.get_ylim()[0]) if task == "regression" else 0.0, top)
    axes.set_ylabel(f"{SCORED[task].metric}{more}")


def direction(task: ScoredTask) -> str:
    """Return a sentence for a caption on how to read the score; empty for accuracy."""
    return f" {SCORED[task].described}." if SCORED[task].best else ""


def interval_text(score: float | None, samples: int, task: ScoredTask) -> str:
    """Return the confidence interval of a score as text for a table; empty if there is none."""
    between = None if score is None else interval_of(score, samples, task)
    return "" if between is None else "{:.3f}-{:.3f}".format(*between)


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
        return file_of(self.figure)

    def file_of(self, form: Format) -> bytes:
        """Return the picture as a file of this form."""
        return self.png if form == "png" else file_of(self.figure, form)


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
