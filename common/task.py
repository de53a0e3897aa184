"""Tasks of a model: classes, numbers, or several labels at once. Names and words only, without torch.

In every task a sample has a score, and a higher score is better. So verdicts, weights and tables are the same for all tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

TaskName = Literal["classes", "regression", "multilabel"]
_SHOWN = 4


@dataclass(frozen=True)
class Task:
    """Words for one task.

    Attributes:
        name: The name in settings and in meta.json.
        metric: The name of the mean score.
        best: How to read the score; empty for accuracy.
        outputs: The things for which a model gives a number each.
        needs: The form of y, for errors.
    """

    name: TaskName
    metric: str
    best: str
    outputs: str
    needs: str

    @property
    def described(self) -> str:
        """The metric with how to read it, for a heading or an axis."""
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
    """Return the metric of this name with how to read it."""
    return next((task.described for task in TASKS.values() if task.metric == metric), metric)


def asked(task: TaskName, outputs: Sequence[int | str]) -> str:
    """Return the task in words for a message, with the names of its targets or labels."""
    if task == "classes":
        return "classes"
    more = ", ..." if len(outputs) > _SHOWN else ""
    return f"{task} of {len(outputs)} {TASKS[task].outputs} ({', '.join(str(name)[:40] for name in outputs[:_SHOWN])}{more})"
