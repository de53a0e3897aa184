"""Figures as PNG bytes, and the colours that all pictures share; matplotlib is imported when a figure is made."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

from attune.common.errors import SettingError

DPI = 120
COLOURS = ("#3566a8", "#e08214", "#4d9c4a", "#b3478f", "#7f7f7f", "#17a2b8", "#8c564b", "#d4b106", "#d62728", "#5e3c99")
BEFORE, AFTER, COMMON, LOCAL = COLOURS[0], COLOURS[1], COLOURS[4], COLOURS[2]


def new(width: float, height: float) -> Any:
    """An empty matplotlib Figure, `width` by `height` inches. Errors: SettingError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise SettingError("pictures need matplotlib, which is not installed: pip install 'attune-fl[data]'") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def png(figure: Any) -> bytes:
    """The figure as a file; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def plain(axes: Any, grid: str | None = "y") -> None:
    """No frame above and on the right, and a light grid behind what is drawn."""
    axes.spines[["top", "right"]].set_visible(False)
    if grid:
        axes.grid(axis=grid, color="0.9", linewidth=0.8)
        axes.set_axisbelow(True)


def natural(names: Iterable[str]) -> list[str]:
    """Sorted with numbers by their value: shard2 before shard10."""

    def key(name: str) -> list[tuple[bool, int, str]]:
        return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]

    return sorted(names, key=key)


def short(names: Sequence[str]) -> list[str]:
    """Without the words, up to a hyphen or underscore, with which all of them begin."""
    common = os.path.commonprefix(list(names)) if len(names) > 1 else ""  # noqa: RUF071 (by character is meant)
    cut = max(common.rfind("-"), common.rfind("_")) + 1
    return [name[cut:] or name for name in names]
