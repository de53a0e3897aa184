"""The accuracy of a finished model on a shard's test part, offline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attune.common.task import TASKS
from attune.fedclient.home import DeviceHome
from attune.fedclient.read_options import PLAIN, ReadOptions


@dataclass(frozen=True)
class Evaluation:
    name: str  # of the device
    method: str
    accuracy: float
    samples: int
    round: int
    kept: str  # which of the device's models this is, or counts most
    title: str  # the method, and which of the device's models this is
    metric: str = "accuracy"  # what `accuracy` is: common.task

    def __str__(self) -> str:
        return f"{self.name} ({self.title}): {self.metric} {self.accuracy:.4f} on {self.samples} test samples"


def of(home: DeviceHome, shard: Path, table: ReadOptions = PLAIN) -> Evaluation:
    """The evaluation of the model in `home`. Errors: NoModel, and those of load_shard and Model.evaluate."""
    from attune.fedclient.data.shard import load_shard
    from attune.fedclient.model.artifact import Model

    model = Model.load(home.model)
    accuracy, samples = model.evaluate(load_shard(shard, options=table))
    info = model.info
    return Evaluation(info.name, info.method, accuracy, samples, info.round, info.kept, info.title, TASKS[info.task].metric)


def means(evaluations: Sequence[Evaluation]) -> dict[str, float]:
    """`accuracy`, the mean over clients, and `over_samples`, the mean over all their test samples."""
    total = sum(evaluation.samples for evaluation in evaluations)
    return {
        "accuracy": sum(evaluation.accuracy for evaluation in evaluations) / len(evaluations),
        "over_samples": sum(evaluation.accuracy * evaluation.samples for evaluation in evaluations) / total,
    }
