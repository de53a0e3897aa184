"""Fitting of ordinary models by scikit-learn: which ones a device tries, and their state as tensors.

N samples, D features, K classes that occur, or labels or numbers. scikit-learn is imported where models are fitted.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from attune.common.plan import Kind
from attune.common.task import ScoredTask, TaskName
from attune.fedclient.data.arrays import Array
from attune.fedclient.work.survival import cox_loss

TREES = 100
BOOSTED_SAMPLES, BOOSTED_FEATURES = 1_000, 100  # boosting above so many samples, below so many features
STEPS = 300  # most of the logistic regression, and of the Cox model
CERTAIN = 20.0  # log odds of a label that all training samples have
NAMES = ("logistic", "ridge", "cox", "nearest-1", "nearest-3", "forest", "boosting")  # the simplest first

Tensors = dict[str, torch.Tensor]


class Samples(NamedTuple):
    """Training samples of a device.

    Attributes:
        x: Features, (N, D) float32.
        y: Indices of classes, (N,) int64; labels or numbers, (N, K) float32.
        task: The task. In survival y (N, 2) has times and events.
        kind: Kind of the samples. Images have one scale for all pixels.
        groups: Group of each sample, (N,); None without groups.
        scored: The task with the score of the plan; None: the task's own.
    """

    x: Array
    y: Array
    task: TaskName
    kind: Kind
    groups: Array | None = None
    scored: ScoredTask | None = None

    def part(self, rows: Array) -> Samples:
        """Return some of the samples, without their groups."""
        return self._replace(x=self.x[rows], y=self.y[rows], groups=None)


class Fitted(NamedTuple):
    """Fitted model.

    Attributes:
        tensors: Its state, for `evaluators.evaluator`.
        out_of_bag: Probabilities or numbers for each training sample by the trees that have not seen it, (N, K); None for
            other models.
    """

    tensors: Tensors
    out_of_bag: npt.NDArray[np.float64] | None = None


Fit = Callable[[Samples], Fitted]


def fits_for(samples: Samples) -> dict[str, Fit]:
    """Return what fits each model of the portfolio for such samples, by the model's name, in the order of NAMES."""
    if samples.task == "survival":
        return {"cox": _cox}
    numbers = samples.task == "regression"
    fits: dict[str, Fit] = {
        "ridge" if numbers else "logistic": _ridge if numbers else _logistic,
        "nearest-1": lambda some: _nearest(some, 1),
        "nearest-3": lambda some: _nearest(some, 3),
        "forest": _forest,
    }
    single = samples.task == "classes" or (numbers and samples.y.shape[1] == 1)
    if single and len(samples.x) > BOOSTED_SAMPLES and samples.x.shape[1] < BOOSTED_FEATURES:
        fits["boosting"] = _boosting
    return fits


def _scaling(samples: Samples) -> tuple[Array, Array]:
    """Return the mean and deviation of each feature, (D,); of images one for all pixels."""
    x = samples.x.astype(np.float64)
    if samples.kind == "images":
        mean_D, std_D = np.full(x.shape[1], x.mean()), np.full(x.shape[1], x.std())
    else:
        mean_D, std_D = x.mean(axis=0), x.std(axis=0)
    return mean_D, np.where(std_D > 0, std_D, 1.0)


def _linear(coefficient_KD: Array, intercept_K: Array, mean_D: Array, std_D: Array) -> Tensors:
    """Return a linear model of scaled features as one of the features themselves."""
    weight_KD = coefficient_KD / std_D
    return {"weight": torch.from_numpy(weight_KD), "bias": torch.from_numpy(intercept_K - weight_KD @ mean_D)}


def _logistic(samples: Samples) -> Fitted:
    from sklearn.linear_model import LogisticRegression

    mean_D, std_D = _scaling(samples)
    x = (samples.x - mean_D) / std_D

    def fit(y: Array) -> tuple[Array, Array]:
        """Return weights (K, D) and biases (K,) of a softmax over the classes in y, in order."""
        if len(np.unique(y)) < 2:
            return np.zeros((1, x.shape[1])), np.zeros(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it has not converged; the folds say how good it is
            model = LogisticRegression(max_iter=STEPS).fit(x, y)
        if len(model.coef_) > 1:
            return model.coef_, model.intercept_
        return np.vstack([np.zeros_like(model.coef_), model.coef_]), np.concatenate([[0.0], model.intercept_])

    if samples.task == "classes":
        return Fitted(_linear(*fit(samples.y), mean_D, std_D) | {"classes": torch.from_numpy(np.unique(samples.y))})
    rows, biases = [], []
    for y in samples.y.T:
        coefficient, intercept = fit(y)
        known = len(coefficient) > 1
        rows.append(coefficient[-1])
        biases.append(intercept[-1] if known else 2 * CERTAIN * y[0] - CERTAIN)
    return Fitted(_linear(np.stack(rows), np.array(biases), mean_D, std_D))


def _cox(samples: Samples) -> Fitted:
    """Fit a linear Cox model by its partial likelihood, with a standard normal prior of the weights of scaled features."""
    mean_D, std_D = _scaling(samples)
    x, y = torch.from_numpy((samples.x - mean_D) / std_D), torch.from_numpy(samples.y).double()
    weight_D = torch.zeros(x.shape[1], dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS([weight_D], max_iter=STEPS, line_search_fn="strong_wolfe")
    events = y[:, 1].sum().clamp(min=1)

    def loss() -> torch.Tensor:
        search.zero_grad()
        value = cox_loss(x @ weight_D, y[:, 0], y[:, 1]) + weight_D.square().sum() / (2 * events)
        value.backward()
        return value

    with torch.enable_grad():
        search.step(loss)
    return Fitted(_linear(weight_D.detach().numpy()[None], np.zeros(1), mean_D, std_D))


def _ridge(samples: Samples) -> Fitted:
    from sklearn.linear_model import RidgeCV

    mean_D, std_D = _scaling(samples)
    model = RidgeCV(alphas=np.logspace(-2, 4, 13)).fit((samples.x - mean_D) / std_D, samples.y)
    return Fitted(_linear(np.atleast_2d(model.coef_), np.atleast_1d(model.intercept_), mean_D, std_D))


def _nearest(samples: Samples, k: int) -> Fitted:
    value_NK, more = _values(samples)
    tensors = {
        "row": torch.from_numpy(samples.x),
        "value": torch.from_numpy(value_NK),
        "places": torch.arange(min(k, len(samples.x))),
    }
    return Fitted(tensors | more)


def _values(samples: Samples) -> tuple[Array, Tensors]:
    """Return what each sample votes for, (N, K) float32, and the classes (K,) if there are any."""
    if samples.task != "classes":
        return samples.y, {}
    classes, place_N = np.unique(samples.y, return_inverse=True)
    return np.eye(len(classes), dtype=np.float32)[place_N], {"classes": torch.from_numpy(classes)}


def _forest(samples: Samples) -> Fitted:
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

    numbers = samples.task == "regression"
    # scikit-learn has no predictions out of bag for several labels of which one never changes.
    with_bags = len(samples.x) > 1 and (samples.task != "multilabel" or bool((samples.y != samples.y[0]).any(axis=0).all()))
    kind = RandomForestRegressor if numbers else RandomForestClassifier
    forest: Any = kind(TREES, oob_score=with_bags, random_state=0)
    y = samples.y[:, 0] if samples.y.ndim == 2 and samples.y.shape[1] == 1 else samples.y
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that some samples are in each tree
        forest.fit(samples.x, y)
    trees = [tree.tree_ for tree in forest.estimators_]
    more: Tensors = {}
    if samples.task == "classes":
        more = {"classes": torch.from_numpy(np.asarray(forest.classes_, dtype=np.int64))}
        values = [tree.value[:, 0] / tree.value[:, 0].sum(axis=1, keepdims=True) for tree in trees]
    elif numbers:
        values = [tree.value[:, :, 0] for tree in trees]
    else:
        known = forest.classes_ if isinstance(forest.classes_, list) else [forest.classes_]
        values = [_chances(tree.value, known) for tree in trees]
    arrays = [
        (t.feature, t.threshold, t.children_left, t.children_right, v / TREES) for t, v in zip(trees, values, strict=True)
    ]
    return Fitted(_together(arrays) | more, _out_of_bag(forest, samples))


def _chances(value_MKC: Array, known: list[Array]) -> Array:
    """Return the share of 1 of each label in each node, (M, K). `known` has the values of each label."""
    shares = []
    for label, values in enumerate(known):
        of_node = value_MKC[:, label, : len(values)]
        shares.append((of_node @ (values > 0)) / of_node.sum(axis=1))
    return np.stack(shares, axis=1)


def _out_of_bag(forest: Any, samples: Samples) -> npt.NDArray[np.float64] | None:
    """Return what the trees that have not seen a sample predict of it, (N, K); None where a sample is in each tree."""
    if not hasattr(forest, "oob_score_"):
        return None
    if samples.task == "regression":
        outputs = forest.oob_prediction_.reshape(len(samples.x), -1)
    else:
        outputs = forest.oob_decision_function_
        if samples.task == "multilabel":
            outputs = outputs.reshape(len(outputs), 2, -1)[:, 1] if outputs.ndim == 3 else outputs[:, 1:]
    return outputs if np.isfinite(outputs).all() else None


def _boosting(samples: Samples) -> Fitted:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    numbers = samples.task == "regression"
    model: Any = (HistGradientBoostingRegressor if numbers else HistGradientBoostingClassifier)(random_state=0)
    model.fit(samples.x.astype(np.float64), samples.y.ravel())
    classes = 1 if numbers else len(model.classes_)
    # Of two classes scikit-learn has one score, that of the second.
    place = (lambda column: column) if numbers or classes > 2 else (lambda column: 1)
    arrays = []
    for step in model._predictors:
        for column, tree in enumerate(step):
            nodes = tree.nodes
            leaf_M = nodes["is_leaf"].astype(bool)
            value_MK = np.zeros((len(nodes), classes))
            value_MK[leaf_M, place(column)] = nodes["value"][leaf_M]
            left_M, right_M = (np.where(leaf_M, -1, nodes[side].astype(np.int64)) for side in ("left", "right"))
            arrays.append((nodes["feature_idx"], np.where(leaf_M, 0.0, nodes["num_threshold"]), left_M, right_M, value_MK))
    base_K = np.zeros(classes)
    base_K[[place(column) for column in range(len(model._predictors[0]))]] = model._baseline_prediction.ravel()
    more = {} if numbers else {"classes": torch.from_numpy(np.asarray(model.classes_, dtype=np.int64))}
    return Fitted(_together(arrays) | more | {"base": torch.from_numpy(base_K)})


def _together(trees: list[tuple[Array, Array, Array, Array, Array]]) -> Tensors:
    """Return trees (feature, threshold, left, right, value) one after the other. A leaf, with -1, gets itself on both sides."""
    size_T = np.array([len(tree[0]) for tree in trees])
    root_T = np.concatenate([[0], size_T.cumsum()[:-1]])
    place_M, first_M = np.arange(size_T.sum()), np.repeat(root_T, size_T)
    feature, threshold, left, right, value = (np.concatenate(column) for column in zip(*trees, strict=True))
    leaf_M = left < 0
    sides = [np.where(leaf_M, place_M, side + first_M) for side in (left, right)]
    return {
        "feature": torch.from_numpy(np.where(leaf_M, 0, feature).astype(np.int64)),
        "threshold": torch.from_numpy(threshold.astype(np.float64)),
        "left": torch.from_numpy(sides[0].astype(np.int64)),
        "right": torch.from_numpy(sides[1].astype(np.int64)),
        "value": torch.from_numpy(value.astype(np.float32)),
        "root": torch.from_numpy(root_T.astype(np.int64)),
        "base": torch.zeros(value.shape[1], dtype=torch.float64),
    }
