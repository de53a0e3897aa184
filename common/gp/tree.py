"""A binary tree over the classes that a device has: one two-class problem at each inner node.

P points.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Split(NamedTuple):
    """An inner node: the classes that go left, and those that go right."""

    left: tuple[int, ...]
    right: tuple[int, ...]


def splits(classes: Sequence[int]) -> list[Split]:
    """The inner nodes, root first, of the tree that halves the classes in order: one fewer than there are classes."""
    if len(classes) < 2:
        return []
    left, right = classes[: len(classes) // 2], classes[len(classes) // 2 :]
    return [Split(tuple(left), tuple(right)), *splits(left), *splits(right)]


def members(labels_P: Tensor, split: Split) -> tuple[Tensor, Tensor]:
    """(which points come to this node (p,), where each goes (p,): 1.0 left, -1.0 right, float64)."""
    left_P = torch.isin(labels_P, torch.tensor(split.left, device=labels_P.device))
    right_P = torch.isin(labels_P, torch.tensor(split.right, device=labels_P.device))
    index_p = (left_P | right_P).nonzero().flatten()
    return index_p, left_P[index_p].double() * 2 - 1
