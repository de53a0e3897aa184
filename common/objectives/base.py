"""The interface of an objective, and the loss that all of them start from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch.nn.functional import cross_entropy

Forward = Callable[[Mapping[str, torch.Tensor], torch.Tensor], torch.Tensor]  # (parameters, x) -> logits (N, ..., C)


class Objective(Protocol):
    """What a local step minimises. Constructed with its settings."""

    def loss(
        self,
        forward: Forward,
        params: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        y: torch.Tensor,
        received: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """A scalar for one mini-batch; `received` is what the server last sent, fixed during local training."""
        ...


def mean_cross_entropy(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean over samples, and over positions where every position has a label: logits (N, ..., C), y (N, ...)."""
    return cross_entropy(logits.flatten(end_dim=-2), y.flatten())
