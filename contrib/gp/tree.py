"""A binary tree over the classes that a device has: one two-class problem at each inner node.

P points, D features, K classes that occur, C classes of the model, J = K - 1 inner nodes. A tree is a tensor sides_JC, root
first: 1 for a class that goes left at a node, -1 for one that goes right, 0 for one that never comes there.
"""

from __future__ import annotations

import torch
from torch import Tensor

SWEEPS = 20  # of the clustering, at most: few class means settle in two or three


def class_tree(features_PD: Tensor, labels_P: Tensor, classes: int) -> Tensor:
    """Return the tree (J, C), int64: classes are divided by the likeness of their mean features, again and again.

    GP-Tree: Achituve, Navon, Yemini, Chechik, Fetaya, ICML 2021.
    """
    present_K = torch.unique(labels_P)
    means_KD = torch.stack([features_PD[labels_P == label].mean(dim=0) for label in present_K])
    rows: list[Tensor] = []
    _divide(present_K, means_KD, classes, rows)
    return torch.stack(rows) if rows else labels_P.new_zeros(0, classes)


def members(labels_P: Tensor, side_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return which points come to this node (p,), and where each goes (p,): 1.0 left, -1.0 right, float64."""
    side_P = side_C[labels_P]
    index_p = side_P.nonzero().flatten()
    return index_p, side_P[index_p].double()


def _divide(classes_K: Tensor, means_KD: Tensor, classes: int, rows: list[Tensor]) -> None:
    if len(classes_K) < 2:
        return
    left_K = _two_means(means_KD)
    if left_K.all():  # means that coincide, or are not numbers
        left_K = torch.arange(len(left_K), device=left_K.device) < len(left_K) // 2
    row_C = classes_K.new_zeros(classes)
    row_C[classes_K] = torch.where(left_K, 1, -1)
    rows.append(row_C)
    for side_K in (left_K, ~left_K):
        _divide(classes_K[side_K], means_KD[side_K], classes, rows)


def _two_means(means_KD: Tensor) -> Tensor:
    """Return (K,) bool: the cluster that the first is in, of two that start as the two means furthest apart."""
    square_KK = (means_KD.unsqueeze(1) - means_KD).square().sum(dim=-1)
    one, two = divmod(int(square_KK.argmax()), len(means_KD))
    left_K = square_KK[one] < square_KK[two]
    for _ in range(SWEEPS):
        to_left_K, to_right_K = ((means_KD - means_KD[side].mean(dim=0)).square().sum(dim=-1) for side in (left_K, ~left_K))
        before_K, left_K = left_K, to_left_K < to_right_K
        if left_K.equal(before_K):
            break
    return left_K if left_K[0] else ~left_K
