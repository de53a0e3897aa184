"""Evaluators of fitted models: modules that compute, from tensors, what scikit-learn's models predict.

B samples, D features, K outputs, C classes of the plan, M nodes of T trees. The tensors are a model's whole state, so it is
saved, exported and blended like a network, without pickle.

Scores are log probabilities (classes), log odds (several labels) or numbers. A probability is never 0: a model of a few samples
may be certain and wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from attune.common.task import TaskName
from attune.fedclient.work.orders import ROWS

LEAST = 1e-3  # of a probability
MOST_DEPTH = 10_000  # of a tree: each step takes time

Tensors = Mapping[str, Tensor]
Read = Callable[[Tensor], Tensor]


def flattened(x: Tensor) -> Tensor:
    """Return the numbers of samples (B, ...) as features, (B, D)."""
    return x.flatten(1)


class _Fitted(nn.Module):
    """Fitted model. Its buffers have the names and shapes of its tensors, with which `functional_call` replaces them.

    Args:
        tensors: The model's tensors; `classes` (K,) has the index in the plan of each class that the device knows.
        task: The task.
        outputs: C, or the number of labels or numbers.
        read: Returns the features (B, D) of samples (B, ...).
    """

    def __init__(self, tensors: Tensors, task: TaskName, outputs: int, read: Read) -> None:
        super().__init__()
        self._task, self._outputs, self._read = task, outputs, read
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def scores(self, shares_BK: Tensor) -> Tensor:
        """Return scores, (B, C), from probabilities or numbers (B, K)."""
        if self._task in ("regression", "survival"):
            return shares_BK.float()
        if self._task == "multilabel":
            share_BK = (shares_BK + LEAST) / (1 + 2 * LEAST)
            return (share_BK / (1 - share_BK)).log().float()
        all_BC = shares_BK @ one_hot(self.get_buffer("classes"), self._outputs).to(shares_BK.dtype)
        return ((all_BC + LEAST) / (1 + self._outputs * LEAST)).log().float()


class LinearModel(_Fitted):
    """Linear model: weight (K, D), bias (K,), float64. Logistic with classes and labels; log hazards in survival."""

    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return scores (B, C) of x (B, ...)."""
        return self.answers(self.features(x) @ self.weight.T + self.bias)

    def features(self, x: Tensor) -> Tensor:
        """Return what the model is linear in, (B, D) float64."""
        return self._read(x).double()

    def answers(self, value_BK: Tensor) -> Tensor:
        """Return scores (B, C) from the values of the linear model, (B, K)."""
        if self._task == "classes":
            value_BK = value_BK.softmax(dim=1)
        elif self._task == "multilabel":
            value_BK = value_BK.sigmoid()
        return self.scores(value_BK)


class FourierModel(LinearModel):
    """Linear model on the features sqrt(2 / R) cos(F x + p), in which x is scaled by its mean and deviation.

    Tensors beside the linear model's: frequency (I, R), phase (R,), pixels (2,).
    """

    frequency: Tensor
    phase: Tensor
    pixels: Tensor

    def features(self, x: Tensor) -> Tensor:
        scaled_BI = (super().features(x) - self.pixels[0]) / self.pixels[1]
        angle_BR = scaled_BI @ self.frequency.double() + self.phase.double()
        return angle_BR.cos() * math.sqrt(2 / len(self.phase))


class Trees(_Fitted):
    """Sum of decision trees, which lie one after the other.

    A sample goes left where its feature is at most the threshold. A leaf has itself on both sides. Sums are probabilities,
    numbers, or (boosting with classes) scores of a softmax.

    Tensors: feature, left, right (M,) int64; threshold (M,) float64; value (M, K); root (T,); base (K,).
    """

    feature: Tensor
    threshold: Tensor
    left: Tensor
    right: Tensor
    value: Tensor
    root: Tensor
    base: Tensor

    def __init__(self, tensors: Tensors, task: TaskName, outputs: int, read: Read, softmax: bool) -> None:
        super().__init__(tensors, task, outputs, read)
        self._softmax, self._depth = softmax, _depth(self.left, self.right, self.root)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores (B, C) of x (B, ...)."""
        x_BD = self._read(x).double()
        node_BT = self.root.expand(x_BD.shape[0], -1)  # a length would be fixed in an export
        for _ in range(self._depth):
            goes_left = x_BD.gather(1, self.feature[node_BT]) <= self.threshold[node_BT]
            node_BT = torch.where(goes_left, self.left[node_BT], self.right[node_BT])
        sum_BK = self.value[node_BT].double().sum(dim=1) + self.base
        return self.scores(sum_BK.softmax(dim=1) if self._softmax else sum_BK)


def _depth(left_M: Tensor, right_M: Tensor, root_T: Tensor) -> int:
    """Return the number of steps after which every sample is in a leaf.

    Raises:
        ValueError: Some node is reached twice, or after too many steps. The tensors may be a stranger's.
    """
    depth, nodes, unseen = 0, root_T, len(left_M)
    while True:
        inner = nodes[left_M[nodes] != nodes]
        if not len(inner):
            return depth
        depth, nodes, unseen = depth + 1, torch.cat([left_M[inner], right_M[inner]]), unseen - len(inner)
        if unseen < 0 or depth > MOST_DEPTH:
            raise ValueError("its trees have no end, or are too deep")


class Neighbours(_Fitted):
    """The k nearest training samples by Euclidean distance, which count alike: row (N, D), value (N, K), k = len(places)."""

    row: Tensor
    value: Tensor
    places: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return scores (B, C) of x (B, ...)."""
        x_BD, row_ND = self._read(x).double(), self.row.double()
        square_BN = row_ND.square().sum(dim=1) - 2 * x_BD @ row_ND.T  # and the square of x, which is the same for all rows
        nearest_Bk = square_BN.topk(len(self.places), dim=1, largest=False).indices
        return self.scores(self.value[nearest_Bk].double().mean(dim=1))


def evaluator(
    name: str, tensors: Tensors, task: TaskName, outputs: int, read: Read = flattened
) -> LinearModel | Trees | Neighbours:
    """Return the module that computes a fitted model's scores.

    Args:
        name: Name of the model, as in `fitting`.
        tensors: Its tensors.
        task: The task.
        outputs: Number of the plan's classes, labels or numbers.
        read: Returns the features of samples.
    """
    if ROWS in tensors:
        return Neighbours(tensors, task, outputs, read)
    if "root" in tensors:
        return Trees(tensors, task, outputs, read, softmax=name == "boosting" and task == "classes")
    if "frequency" in tensors:
        return FourierModel(tensors, task, outputs, flattened)  # of the samples' own numbers, also beside a frozen body
    return LinearModel(tensors, task, outputs, read)
