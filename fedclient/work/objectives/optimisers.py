"""The optimizer of a local step by name, and how its rate changes within an order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from msgspec import UNSET
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from attune.common.config import TrainSettings

_BY_NAME = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}


def optimiser_for(tensors: Sequence[Tensor], settings: TrainSettings) -> torch.optim.Optimizer:
    """Return a fresh optimiser. Only SGD has momentum."""
    if settings.optimizer in (UNSET, "sgd"):
        return torch.optim.SGD(tensors, lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay)
    kind = _BY_NAME[str(settings.optimizer)]
    made: torch.optim.Optimizer = kind(tensors, lr=settings.lr, weight_decay=settings.weight_decay)
    return made


def schedule_for(optimiser: torch.optim.Optimizer, settings: TrainSettings, steps: int) -> LambdaLR | None:
    """Return a schedule to step after each batch of `steps`; None if the rate is constant."""
    if settings.schedule in (UNSET, "constant"):
        return None
    if settings.schedule == "linear":
        return LambdaLR(optimiser, lambda step: max(0.0, 1 - step / steps))
    return LambdaLR(optimiser, lambda step: (1 + math.cos(math.pi * min(1.0, step / steps))) / 2)
