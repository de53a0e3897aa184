"""What models are asked: which class, which numbers, or which of several labels. Names and words alone; no torch.

Of every task a sample has a score of which more is better, so verdicts, weights and tables are the same for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

TaskName = Literal["classes", "regression", "multilabel"]
_SHOWN = 4


@dataclass(frozen=True)
class Task:
    """metric: what the mean score is called. best: said where it is shown. outputs: what a model gives a number for."""

    name: TaskName
    metric: str
    best: str
    outputs: str
    needs: str  # of y, in an error

    @property
    def described(self) -> str:
        """The metric with its direction, for a heading or an axis."""
        return f"{self.metric} ({self.best})" if self.best else self.metric


CLASSES = Task("classes", "accuracy", "", "classes", "a class for every sample: integers or text, shape (N,)")
REGRESSION = Task(
    "regression",
    "R2",
    "more is better: 1 is perfect, 0 no better than the mean",
    "targets",
    "numbers, shape (N,) or (N, K)",
)
MULTILABEL = Task(
    "multilabel", "label accuracy", "more is better: share of labels that are right", "labels", "0 or 1, shape (N, K)"
)
TASKS: dict[TaskName, Task] = {task.name: task for task in (CLASSES, REGRESSION, MULTILABEL)}


def described(metric: str) -> str:
    """The metric of this name with its direction."""
    return next((task.described for task in TASKS.values() if task.metric == metric), metric)


def asked(task: TaskName, outputs: Sequence[int | str]) -> str:
    """For a message: the task, and of what, where a task says so."""
    if task == "classes":
        return "classes"
    more = ", ..." if len(outputs) > _SHOWN else ""
    return f"{task} of {len(outputs)} {TASKS[task].outputs} ({', '.join(str(name)[:40] for name in outputs[:_SHOWN])}{more})"
