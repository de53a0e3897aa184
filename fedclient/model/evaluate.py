"""How good a finished model is on a shard's test part, offline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attune.fedclient.home import Home


@dataclass(frozen=True)
class Verdict:
    name: str  # of the device
    method: str
    accuracy: float
    samples: int
    round: int
    kept: str  # which of the device's models this is

    def __str__(self) -> str:
        what = self.method if self.kept == "personalized" else f"{self.method}, {self.kept} model"
        return f"{self.name} ({what}): accuracy {self.accuracy:.4f} on {self.samples} test samples"


def of(home: Home, shard: Path) -> Verdict:
    """Of the model in `home`. Errors: NoModel, and those of load_shard and Model.evaluate."""
    from attune.fedclient.data.shard import load_shard
    from attune.fedclient.model.artifact import Model

    model = Model(home.model)
    accuracy, samples = model.evaluate(load_shard(shard))
    info = model.info
    return Verdict(info.name, info.method, accuracy, samples, info.round, info.kept)


def means(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """`accuracy`, the mean over clients, and `over_samples`, the mean over all their test samples."""
    total = sum(verdict.samples for verdict in verdicts)
    return {
        "accuracy": sum(verdict.accuracy for verdict in verdicts) / len(verdicts),
        "over_samples": sum(verdict.accuracy * verdict.samples for verdict in verdicts) / total,
    }
