"""Rivals of a federation: scikit-learn's models, which each device fits and chooses alone on its own training part.

Nothing of Attune's training has a part in them: of Attune only the reader of shards is used. Features are those that a user of
scikit-learn would take. Images are divided by 255, and scaled with one mean and deviation for all pixels. Tables and series are
flattened; medians take the place of missing values, and columns are standardised where the model needs it. Each pipeline finds
these numbers on the samples that it fits. A device fits all its training samples; its folds are cut out of them.

N samples, F features, K targets or labels (1 for classes), n test samples.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.model_selection import GroupKFold, KFold, StratifiedGroupKFold, StratifiedKFold
from sklearn.multiclass import OneVsRestClassifier
from sklearn.multioutput import MultiOutputRegressor
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from attune.common.errors import SettingError, ShardError
from attune.common.plan import Kind
from attune.fedclient import shards as shard_paths
from attune.fedclient.data.arrays import Array
from attune.fedclient.data.holdout import NEIGHBOURS
from attune.fedclient.data.shard import Shard, load_shard
from attune.fedclient.read_options import ReadOptions

Numbers = npt.NDArray[np.float64]
Fold = tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]  # the places that are fitted, and those that are predicted
Make = Callable[[int], Any]  # returns an estimator for this number of samples

LINEAR, RIDGE, NEAREST, NEAREST_3 = "logistic regression", "ridge", "1 nearest neighbour", "3 nearest neighbours"
FOREST, VECTORS, BOOSTED = "random forest", "support vector machine", "gradient boosting"
CHOSEN = "chosen"
FOLDS = 5
SEED = 0  # of folds and forests
BOOSTED_ABOVE, BOOSTED_BELOW = 1000, 100  # training samples, features
PENALTIES = np.logspace(-2, 4, 13)  # of ridge regression, which chooses one by leaving out each sample
# Of the support vector machine. Out of fold, on training parts cut with seed 7, 10 is better than scikit-learn's 1 on digits,
# Fashion-MNIST, WISDM and UCI-HAR (by 0.6 to 11 points), and worse on heart disease (by 2.5).
MARGIN = 10.0
STEPS = 1000  # of logistic regression, at most; scikit-learn's 100 are too few for some devices
AS_THEY_ARE = ReadOptions(missing="keep")  # each pipeline fills missing values in


class OneScale(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Standardisation of images by one mean and one deviation of all pixels of all images, which keeps pixels comparable."""

    def fit(self, x: Numbers, y: Array | None = None) -> OneScale:
        self.mean_, self.deviation_ = x.mean(), x.std() or 1.0
        return self

    def transform(self, x: Numbers) -> Numbers:
        return np.asarray((x - self.mean_) / self.deviation_)


@dataclass(frozen=True)
class RivalData:
    """One device's samples as scikit-learn takes them.

    Attributes:
        train_x, test_x: Features, (N, F) and (n, F); NaN is a missing value.
        train_y, test_y: Classes, (N,); otherwise numbers or labels, (N, K).
        groups: Group of each training sample, (N,), or None.
    """

    shard: Shard
    train_x: Numbers
    train_y: Array
    test_x: Numbers
    test_y: Array
    groups: Array | None

    @property
    def task(self) -> str:
        return self.shard.task


@dataclass(frozen=True)
class RivalResult:
    """Result of a rival on a device's test part.

    Attributes:
        score_n: Score of each test sample, (n,): whether its class is right, the share of its labels that are, or 1 minus its
            squared error by the variance of the federation. The mean of the last is the R2 of Attune's tables.
        squared_n: Mean squared error of each test sample, (n,), in the unit of y; None but in regression.
        seconds: Processor time of the folds, the fit and the prediction.
    """

    score_n: Numbers
    squared_n: Numbers | None
    seconds: float

    @property
    def mean(self) -> float:
        return float(self.score_n.mean())


def device_scores(shards: Sequence[Path], seed: int = 0) -> dict[str, dict[str, float]]:
    """Return each device's mean score on its test part, by the names of the device and of the rival, with CHOSEN as one.

    The arguments and errors are those of `rival_results`.
    """
    found = rival_results(shards, seed)
    return {device: {rival: result.mean for rival, result in by_rival.items()} for device, by_rival in found.items()}


def rival_results(shards: Sequence[Path], seed: int = 0) -> dict[str, dict[str, RivalResult]]:
    """Return for each device, by its name, what each rival comes to. CHOSEN is the one that the device would keep.

    A device without test samples is left out.

    Args:
        shards: The folder of each device.
        seed: Decides which samples a shard without a test part holds out (fedclient.data.shard).

    Raises:
        SettingError: There is no rival for data of this kind, or the devices have different tasks.
        AttuneError: A shard cannot be read, or no device has test samples.
    """
    devices = dict(zip(shard_paths.labels(shards), (read(path, seed) for path in shards), strict=True))
    if len(tasks := {device.task for device in devices.values()}) > 1:
        raise SettingError(f"the shards have different tasks ({', '.join(sorted(tasks))}); compare those of one task")
    tested = {name: device for name, device in devices.items() if len(device.test_y)}
    if not tested:
        raise ShardError(f"none of these {len(devices)} devices has test samples, so no rival can be scored")
    variance_K = _variance([device.train_y for device in devices.values()]) if tasks == {"regression"} else None
    return {name: results_of(device, variance_K) for name, device in tested.items()}


def read(path: Path, seed: int = 0) -> RivalData:
    """Read a shard as scikit-learn takes it.

    Raises:
        SettingError: There is no rival for data of this kind.
        AttuneError: It cannot be read.
    """
    shard = load_shard(path, seed, AS_THEY_ARE)
    if shard.kind == "tokens" or shard.task == "survival":
        what = "text" if shard.kind == "tokens" else "survival"
        raise SettingError(f"there is no rival for {what}, and {path} holds {what}: leave it out of this comparison")
    train_y, test_y = (y.astype(np.int64) if shard.task == "multilabel" else y for y in (shard.train_y, shard.test_y))
    train_x, test_x = features(shard.train_x, shard.kind), features(shard.test_x, shard.kind)
    return RivalData(shard, train_x, train_y, test_x, test_y, shard.groups)


def features(x: Array, kind: Kind) -> Numbers:
    """Return samples as rows of numbers, (N, F). Images of 8 bits are divided by 255."""
    flat = x.reshape(len(x), int(np.prod(x.shape[1:]))).astype(np.float64)
    return flat / 255 if kind == "images" and x.dtype == np.uint8 else flat


def results_of(device: RivalData, variance_K: Numbers | None) -> dict[str, RivalResult]:
    """Return what each rival comes to on a device, and the one that it chose.

    It chooses the best one out of fold; of equal ones the first, and the first if there are no folds.

    Args:
        device: The device's samples.
        variance_K: Variance of the targets over all devices, (K,), in regression.
    """
    places = folds(device.train_y, device.task, device.shard.kind, device.groups)
    own_K = _variance([device.train_y]) if device.task == "regression" else None
    found: dict[str, RivalResult] = {}
    out_of_fold: dict[str, float] = {}
    for name, make in rivals(device.task, device.shard.kind, *device.train_x.shape).items():
        began = time.process_time()
        held = [
            scores(
                predicted(make, device.train_x[inner], device.train_y[inner], device.train_x[outer]),
                device.train_y[outer],
                own_K,
            )
            for inner, outer in places
        ]
        answer = predicted(make, device.train_x, device.train_y, device.test_x)
        seconds = time.process_time() - began
        squared_n = None if variance_K is None else ((answer - device.test_y) ** 2).mean(axis=1)
        found[name] = RivalResult(scores(answer, device.test_y, variance_K), squared_n, seconds)
        out_of_fold[name] = float(np.concatenate(held).mean()) if held else 0.0
    best = found[max(out_of_fold, key=lambda name: out_of_fold[name])]
    whole = sum(result.seconds for result in found.values())
    return {**found, CHOSEN: RivalResult(best.score_n, best.squared_n, whole)}


def rivals(task: str, kind: Kind, rows: int, columns: int) -> dict[str, Make]:
    """Return the rivals for a task by their names, in the order in which equal ones are chosen.

    Args:
        task: "classes", "multilabel" or "regression".
        kind: Kind of the samples.
        rows: N, the number of training samples.
        columns: F, the number of features.
    """
    boosts = rows > BOOSTED_ABOVE and columns < BOOSTED_BELOW

    def piped(make: Make, scaled: bool = True) -> Make:
        """Return an estimator that is made behind the steps that its features need; one against the rest for several labels."""
        filling = partial(SimpleImputer, strategy="median", keep_empty_features=True)
        steps: list[Callable[[], Any]] = [] if kind == "images" else [filling]
        if scaled:
            steps.append(OneScale if kind == "images" else StandardScaler)
        each = (lambda samples: OneVsRestClassifier(make(samples))) if task == "multilabel" else make
        return lambda samples: make_pipeline(*(step() for step in steps), each(samples))

    if task == "regression":
        found = {
            RIDGE: piped(lambda samples: RidgeCV(PENALTIES)),
            NEAREST: piped(lambda samples: KNeighborsRegressor(1)),
            NEAREST_3: piped(lambda samples: KNeighborsRegressor(min(3, samples))),
            FOREST: piped(lambda samples: RandomForestRegressor(random_state=SEED), scaled=False),
        }
        boosted: Make = lambda samples: MultiOutputRegressor(HistGradientBoostingRegressor(random_state=SEED))  # noqa: E731
    else:
        found = {
            LINEAR: piped(lambda samples: LogisticRegression(max_iter=STEPS)),
            NEAREST: piped(lambda samples: KNeighborsClassifier(1)),
            NEAREST_3: piped(lambda samples: KNeighborsClassifier(min(3, samples))),
            FOREST: piped(lambda samples: RandomForestClassifier(random_state=SEED), scaled=False),
            VECTORS: piped(lambda samples: SVC(C=MARGIN)),
        }
        boosted = lambda samples: HistGradientBoostingClassifier(random_state=SEED)  # noqa: E731
    return {**found, BOOSTED: piped(boosted, scaled=False)} if boosts else found


def predicted(make: Make, x: Numbers, y: Array, new_x: Numbers) -> Array:
    """Return what a rival that is fitted on x and y says of other samples, in the shape of their y.

    If all samples have the same y, there is nothing to fit: it is the answer.
    """
    if (y == y[:1]).all():
        return np.repeat(y[:1], len(new_x), axis=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # y has one column, or all samples have a label
        answer = make(len(x)).fit(x, y).predict(new_x)
    return np.asarray(answer).reshape(len(new_x), *y.shape[1:])


def scores(answer: Array, y: Array, variance_K: Numbers | None) -> Numbers:
    """Return the score of each sample, (n,), as RivalResult has it.

    Args:
        answer: What a rival says, in the shape of y.
        y: Classes, (n,); otherwise numbers or labels, (n, K).
        variance_K: Variance of each target; None for classes and labels.
    """
    if variance_K is not None:
        return np.asarray(1 - ((answer - y) ** 2 / variance_K).mean(axis=1), dtype=np.float64)
    return np.asarray((answer == y).reshape(len(y), -1).mean(axis=1), dtype=np.float64)


def folds(y: Array, task: str, kind: Kind, groups: Array | None) -> list[Fold]:
    """Return at most five folds, each as the places to fit and the places to predict; none if a device has too few samples.

    Classes are spread evenly over the folds. Groups stay together. Without groups, series are cut into blocks of samples that
    follow each other, since their windows usually overlap.

    Args:
        y: Classes, (N,); otherwise numbers or labels, (N, K).
        task: The task.
        kind: Kind of the samples.
        groups: Group of each sample, (N,).
    """
    most = np.unique(y, return_counts=True)[1].max() if task == "classes" else len(y)
    count = int(min(FOLDS, most, len(y) if groups is None else len(np.unique(groups))))
    if count < 2:
        return []
    drawn: Mapping[str, Any] = {} if kind in NEIGHBOURS else {"shuffle": True, "random_state": SEED}
    if task == "classes":
        grouped = StratifiedGroupKFold(count, shuffle=True, random_state=SEED)
        splitter = StratifiedKFold(count, **drawn) if groups is None else grouped
    else:
        splitter = KFold(count, **drawn) if groups is None else GroupKFold(count)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a class has fewer samples than there are folds
        places = list(splitter.split(np.zeros(len(y)), y, groups))
    return [(inner, outer) for inner, outer in places if len(inner) and len(outer)]


def _variance(parts: Sequence[Array]) -> Numbers:
    """Return the variance of each target over all parts, (K,); 1 where it is 0."""
    variance_K = np.concatenate(parts).astype(np.float64).var(axis=0)
    return np.where(variance_K > 0, variance_K, 1.0)
