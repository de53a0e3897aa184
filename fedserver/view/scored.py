"""How scores of a task are shown in pictures and tables: their name with the direction, the axis, and intervals."""

from __future__ import annotations

from typing import Any

from attune.common.interval import interval_of
from attune.common.task import TASKS, TaskName


def axis(axes: Any, task: TaskName, more: str = "", top: float = 1.02) -> None:
    """Labels the y axis, which ends at the best score; it begins at 0, or below it where R2 does. Call it when all is drawn."""
    axes.set_ylim(min(0.0, axes.get_ylim()[0]) if task == "regression" else 0.0, top)
    axes.set_ylabel(f"{TASKS[task].metric}{more}")


def direction(task: TaskName) -> str:
    """A sentence for a caption; empty for accuracy, which everybody knows."""
    return f" {TASKS[task].described}." if TASKS[task].best else ""


def interval_text(score: float | None, samples: int, task: TaskName) -> str:
    """For a cell of a table."""
    between = None if score is None else interval_of(score, samples, task)
    return "" if between is None else "{:.3f}-{:.3f}".format(*between)
