"""Scores of finished models on the test parts of shards, also as clinical readers know them, and how far off numbers are there.

They leave the device nowhere. N test samples, C classes, K numbers, T times. Of two classes the second one is the event.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from attune.common.errors import NEEDS_TORCH, SettingError, ShardError
from attune.common.statistics import LEVEL, wilson
from attune.common.task import SCORED
from attune.fedclient.data.shard import Shard, load_shard
from attune.fedclient.home import DeviceHome
from attune.fedclient.model.light_model import FinishedModel, in_unit, load_model
from attune.fedclient.read_options import PLAIN, ReadOptions
from attune.fedclient.work.auroc import Events, aurocs, has_cases, rarer
from attune.fedclient.work.comparison import Floats, Places


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
    model = load_model(home.model, allow_models)
    info = model.info
    loaded = load_shard(shard, options=info.options_for(shard, table), held=home.held_rows())
    metric = SCORED["dice" if info.model.labels_pixels else info.task].metric
    (accuracy, samples), more = model.evaluate(loaded), scores_on(model, loaded)
    return TestPartScore(info.name, info.method, accuracy, samples, info.round, info.kept, info.title, metric, more)


def mean_scores(scores: Sequence[TestPartScore]) -> dict[str, float]:
    """Return `accuracy`, the mean over clients, and `over_samples`, the mean over all their test samples."""
    total = sum(score.samples for score in scores)
    return {
        "accuracy": sum(score.accuracy for score in scores) / len(scores),
        "over_samples": sum(score.accuracy * score.samples for score in scores) / total,
    }


def half_widths(
    model: FinishedModel, path: Path, table: ReadOptions = PLAIN, held: Collection[str] = ()
) -> npt.NDArray[np.float64]:
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


SMALLEST = 1e-12  # probability of which a logarithm is taken


def scores_on(model: FinishedModel, shard: Shard) -> dict[str, float] | str:
    """Return the scores by name; or in words why there are none. Errors: `Model.right`."""
    if find_spec("sklearn") is None:
        return f"other scores need scikit-learn: {NEEDS_TORCH}"
    (features, y), info, groups = model.test_part(shard), model.info, shard.test_places
    if info.task == "regression":
        return of_numbers(in_unit(y, info.targets), in_unit(model.answers_of(features), info.targets))
    if info.task == "survival" and len(np.unique(y[:, 0])) > 2:  # times
        hazards = (
            model.answers_of(model.prepared(x, names=shard.column_names))[:, 0].astype(float)
            for x in (shard.train_x, shard.test_x)
        )
        return {"integrated Brier score": integrated_brier(np.asarray(shard.train_y, float), y.astype(float), *hazards)}
    if info.model.labels_pixels:
        import torch  # here, because a light device evaluates without it

        from attune.fedclient.work.measures import mean_score
        from attune.fedclient.work.task_measures import overlap

        areas, true = (torch.from_numpy(labels) for labels in (model.answers_of(features), y))
        return {"IoU": mean_score(overlap(areas, true, over_union=True)), "pixel accuracy": mean_score(areas.eq(true))}
    if info.task != "classes" or info.model.per_position:
        return {}
    if not has_cases(y, len(info.classes), groups):
        return f"too few cases ({rarer(y == 1, groups)} events)" if len(info.classes) == 2 else "too few cases of a class"
    shares_NC = model.shares_of(features).astype(np.float64)
    shares_NC /= shares_NC.sum(axis=1, keepdims=True)
    return of_classes(shares_NC, y, groups, info.threshold if isinstance(info.threshold, float) else None)


def of_classes(shares_NC: Floats, y_N: npt.NDArray[Any], groups: Places | None, threshold: float | None) -> dict[str, float]:
    """Return the scores of probabilities of classes; of two also Brier's, the calibration, and those at the threshold.

    A slope of calibration below 1 says that the model is too sure. Observed minus expected is its calibration in the large.
    """
    from sklearn import metrics
    from sklearn.linear_model import LogisticRegression

    answer_N, labels = shares_NC.argmax(axis=1), np.arange(shares_NC.shape[1])
    areas = zip(("AUROC", "AUROC low", "AUROC high"), aurocs(shares_NC, None, y_N, groups).values(), strict=False)
    scores = dict(areas) | {
        "balanced accuracy": metrics.balanced_accuracy_score(y_N, answer_N),
        "F1": metrics.f1_score(y_N, answer_N, average="macro" if len(labels) > 2 else "binary", zero_division=0.0),
        "log loss": metrics.log_loss(y_N, shares_NC, labels=labels),
    }
    if len(labels) == 2:
        share_N, event_N = shares_NC[:, 1], y_N == 1
        logit_N1 = np.log(shares_NC.clip(SMALLEST)) @ np.array([[-1.0], [1.0]])
        scores |= {
            "average precision": metrics.average_precision_score(event_N, share_N),
            "Brier score": metrics.brier_score_loss(event_N, share_N),
            "observed minus expected": event_N.mean() - share_N.mean(),
            "slope of calibration": LogisticRegression(C=np.inf).fit(logit_N1, event_N).coef_[0, 0],
        }
        if threshold is not None:
            scores |= {"threshold": threshold} | at_threshold(share_N >= threshold, event_N, groups)
    return {name: float(value) for name, value in scores.items()}


def at_threshold(called_N: Events, event_N: Events, groups: Places | None) -> dict[str, float]:
    """Return sensitivity and specificity with Wilson's intervals; the samples of a group count once there."""
    scores: dict[str, float] = {}
    for name, right_N, of_N in (("sensitivity", called_N, event_N), ("specificity", ~called_N, ~event_N)):
        share, independent = float(right_N[of_N].mean()), of_N.sum() if groups is None else len(np.unique(groups[of_N]))
        low, high = wilson(share, int(independent))
        scores |= {name: share, f"{name} low": low, f"{name} high": high}
    return scores


def of_numbers(y_NK: Floats, predicted_NK: Floats) -> dict[str, float]:
    """Return the errors of numbers in the unit of y, means over the K of them."""
    from sklearn import metrics

    squares_K = metrics.mean_squared_error(y_NK, predicted_NK, multioutput="raw_values")
    scores = {"MAE": float(metrics.mean_absolute_error(y_NK, predicted_NK)), "RMSE": float(np.sqrt(squares_K).mean())}
    return scores | {f"pinball {at}": float(metrics.mean_pinball_loss(y_NK, predicted_NK, alpha=at)) for at in (0.1, 0.9)}


def integrated_brier(train_N2: Floats, test_N2: Floats, train_hazard_N: Floats, test_hazard_N: Floats) -> float:
    """Return Brier's score of the probability to have had no event, as a mean over the times of the test part.

    Censored samples are made up for by weights (Graf, Schmoor, Sauerbrei, Schumacher, Statistics in Medicine 1999). The model
    gives log hazards alone; the hazard that they share is Breslow's, of the training samples (Biometrics 1974).
    """
    time_U, place_N = np.unique(train_N2[:, 0], return_inverse=True)
    events_U, censored_U = (np.bincount(place_N, train_N2[:, 1] == kind, len(time_U)) for kind in (1, 0))
    at_risk_UN = train_N2[:, 0] >= time_U[:, None]
    base_U = np.cumsum(events_U / (at_risk_UN @ np.exp(train_hazard_N)))
    known_U = np.cumprod(1 - censored_U / np.maximum(1, at_risk_UN.sum(axis=1) - events_U)).clip(SMALLEST)

    def step(value_U: Floats, first: float, time: Floats, side: Literal["left", "right"] = "right") -> Floats:
        return np.append(first, value_U)[np.searchsorted(time_U, time, side)]

    until_N, time_T = test_N2[:, 0], np.unique(test_N2[:, 0])[:-1]  # after the last time nobody is left to be asked
    alive_TN = np.exp(-step(base_U, 0.0, time_T)[:, None] * np.exp(test_hazard_N))
    dead_TN = ((until_N <= time_T[:, None]) & (test_N2[:, 1] > 0)) / step(known_U, 1.0, until_N, "left")
    left_TN = (until_N > time_T[:, None]) / step(known_U, 1.0, time_T)[:, None]
    score_T = (dead_TN * alive_TN**2 + left_TN * (1 - alive_TN) ** 2).mean(axis=1)
    return float(np.average((score_T[1:] + score_T[:-1]) / 2, weights=np.diff(time_T)))
