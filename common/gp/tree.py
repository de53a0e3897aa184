"""A binary tree over the classes that a device has: one two-class problem at each inner node.

N samples.
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


def members(labels_N: Tensor, split: Split) -> tuple[Tensor, Tensor]:
    """(which samples come to this node (n,), where each goes (n,): 1.0 left, -1.0 right, float64)."""
    left_N = torch.isin(labels_N, torch.tensor(split.left, device=labels_N.device))
    right_N = torch.isin(labels_N, torch.tensor(split.right, device=labels_N.device))
    index_n = (left_N | right_N).nonzero().flatten()
    return index_n, left_N[index_n].double() * 2 - 1
