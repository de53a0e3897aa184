"""Scores of finished models on the test parts of shards, and how far off their numbers are there."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from attune.common.errors import SettingError, ShardError
from attune.common.statistics import LEVEL
from attune.common.task import TASKS
from attune.fedclient.data.shard import load_shard
from attune.fedclient.home import DeviceHome
from attune.fedclient.model.artifact import Model
from attune.fedclient.model.clinical_scores import scores_on
from attune.fedclient.read_options import PLAIN, ReadOptions


@dataclass(frozen=True)
class TestPartScore:
    """Score of a finished model on a shard's test part."""

    name: str  # of the device
    method: str
    accuracy: float
    samples: int
    round: int
    kept: str  # which of the device's models this is, or counts most
    title: str  # the method, and which of the device's models this is
    metric: str = "accuracy"  # what `accuracy` is: common.task
    scores: dict[str, float] | str = ""  # further ones, by name; or why there are none

    def __str__(self) -> str:
        said = f"{self.name} ({self.title}): {self.metric} {self.accuracy:.4f} on {self.samples} test samples"
        more = self.scores if isinstance(self.scores, str) else ", ".join(f"{name} {v:.4f}" for name, v in self.scores.items())
        return f"{said}; {more}" if more else said


def score_on_test_part(
    home: DeviceHome, shard: Path, table: ReadOptions = PLAIN, allow_models: Collection[str] = ()
) -> TestPartScore:
    """Evaluate the model in `home` on the test part of `shard`. Raises NoModel, and the errors of load_shard and evaluate."""
    model = Model.load(home.model, allow_models=allow_models)
    info = model.info
    loaded = load_shard(shard, options=info.options_for(shard, table), held=home.held_rows())
    (accuracy, samples), more, metric = model.evaluate(loaded), scores_on(model, loaded), TASKS[info.task].metric
    return TestPartScore(info.name, info.method, accuracy, samples, info.round, info.kept, info.title, metric, more)


def mean_scores(scores: Sequence[TestPartScore]) -> dict[str, float]:
    """Return `accuracy`, the mean over clients, and `over_samples`, the mean over all their test samples."""
    total = sum(score.samples for score in scores)
    return {
        "accuracy": sum(score.accuracy for score in scores) / len(scores),
        "over_samples": sum(score.accuracy * score.samples for score in scores) / total,
    }


def half_widths(model: Model, path: Path, table: ReadOptions = PLAIN, held: Collection[str] = ()) -> npt.NDArray[np.float64]:
    """Return how far the interval of a prediction reaches to both sides, for each of K numbers, (K,), in the unit of y.

    A new sample like those of the test part lies in its interval with a probability of LEVEL, whatever the model: split
    conformal prediction (Lei, G'Sell, Rinaldo, Tibshirani, Wasserman, JASA 2018, section 2.2).

    Args:
        model: The model.
        path: A shard with a test part, on which the model was not trained.
        table: How it is read, if it is a table.
        held: Same as for `load_shard`.

    Raises:
        SettingError: The model predicts no numbers.
        ShardError: The test part is too small, or its samples come in groups. Else as in `load_shard` and `Model.test_part`.
    """
    if model.info.task != "regression":
        raise SettingError("only numbers have intervals; classes and labels have probabilities (--probabilities)")
    shard = load_shard(path, options=model.info.options_for(path, table), held=held)
    features, y_NK = model.test_part(shard)
    place, fewest = math.ceil(round((len(y_NK) + 1) * LEVEL, 6)), math.ceil(LEVEL / (1 - LEVEL) - 1e-6)
    if place > len(y_NK):
        raise ShardError(f"shard {shard.path} has {len(y_NK)} test samples; an interval of {LEVEL:.0%} needs at least {fewest}")
    if shard.test_groups is not None:
        raise ShardError(f"the test samples of shard {shard.path} come in groups, so their errors are not independent")
    error_NK = np.sort(np.abs(model.answers_of(features).astype(np.float64) - y_NK), axis=0)
    return np.asarray(error_NK[place - 1] * np.array(model.info.targets.std if model.info.targets else 1.0))
