"""Tasks of a model: classes, numbers, several labels at once, or survival. Names and words only, without torch.

A higher score is better in every task. A sample has a score in all but survival, whose C-index compares pairs of samples. So
verdicts and weights are the same for the others, and survival has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

TaskName = Literal["classes", "regression", "multilabel", "survival", "custom"]
# ranked: two classes scored by their AUROC; dice, iou: pixels of images scored by the overlap of areas
ScoredTask = Literal["classes", "regression", "multilabel", "survival", "custom", "ranked", "dice", "iou"]
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
        by_sample: Whether each sample has a score and a likelihood.
        of_trials: Whether the score is a share of independent trials, so that it has a confidence interval.
    """

    name: ScoredTask
    metric: str
    best: str
    outputs: str
    needs: str
    by_sample: bool = True
    of_trials: bool = True

    @property
    def described(self) -> str:
        """The metric with how to read it, for a heading or an axis."""
        return f"{self.metric} ({self.best})" if self.best else self.metric

    def width(self, names: int) -> int:
        """Return the number of outputs of a model; `names` is that of the classes, or of the columns of y."""
        return names if self.by_sample else 1


CLASSES = Task("classes", "accuracy", "", "classes", "a class for every sample: integers or text, shape (N,)")
REGRESSION = Task(
    "regression",
    "R2",
    "more is better: 1 is perfect, 0 no better than the mean",
    "targets",
    "numbers, shape (N,) or (N, K)",
    of_trials=False,
)
MULTILABEL = Task(
    "multilabel", "label accuracy", "more is better: share of labels that are right", "labels", "0 or 1, shape (N, K)"
)
SURVIVAL = Task(
    "survival",
    "C-index",
    "more is better: 1 is perfect, 0.5 no better than chance",
    "columns",
    "a time of at least 0 and an event of 0 or 1, shape (N, 2)",
    by_sample=False,
    of_trials=False,
)
RANKED = Task(
    "ranked", "AUROC", "more is better: 1 is perfect, 0.5 no better than chance", "classes", CLASSES.needs, of_trials=False
)
CUSTOM = Task("custom", "score", "more is better", "outputs", "numbers, shape (N, ...)", of_trials=False)
OVERLAP = "more is better: 1 is perfect; mean over images of that of each class but the first, the background"
DICE = Task("dice", "Dice", OVERLAP, "classes", CLASSES.needs, of_trials=False)
IOU = Task("iou", "IoU", OVERLAP, "classes", CLASSES.needs, of_trials=False)
SCORED: dict[ScoredTask, Task] = {
    task.name: task for task in (CLASSES, REGRESSION, MULTILABEL, SURVIVAL, CUSTOM, RANKED, DICE, IOU)
}
TASKS: dict[TaskName, Task] = {name: SCORED[name] for name in get_args(TaskName)}
TIME_AND_EVENT = ("time", "event")  # what the columns of y are in survival, in this order


def described(metric: str) -> str:
    """Return the metric of this name with how to read it."""
    return next((task.described for task in SCORED.values() if task.metric == metric), metric)


def asked(task: TaskName, outputs: Sequence[int | str]) -> str:
    """Return the task in words for a message, with the names of its targets or labels."""
    if task == "classes":
        return "classes"
    more = ", ..." if len(outputs) > _SHOWN else ""
    return f"{task} of {len(outputs)} {TASKS[task].outputs} ({', '.join(str(name)[:40] for name in outputs[:_SHOWN])}{more})"
