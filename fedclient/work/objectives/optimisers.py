"""The optimizer of a local step by name, and how its rate changes within an order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

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


def optimiser_for(
    tensors: Mapping[str, Tensor], settings: TrainSettings, decay: Callable[[str], float]
) -> torch.optim.Optimizer:
    """Return a fresh optimiser, where `decay` has the weight decay of each tensor. Only SGD has momentum."""
    rates: dict[float, list[Tensor]] = {}
    for name, tensor in tensors.items():
        rates.setdefault(decay(name), []).append(tensor)
    groups = [{"params": some, "weight_decay": rate} for rate, some in rates.items()]
    if settings.optimizer in (UNSET, "sgd"):
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum)
    made: torch.optim.Optimizer = _BY_NAME[str(settings.optimizer)](groups, lr=settings.lr)
    return made


def schedule_for(optimiser: torch.optim.Optimizer, settings: TrainSettings, steps: int) -> LambdaLR | None:
    """Return a schedule to step after each batch of `steps`; None if the rate is constant."""
    if settings.schedule in (UNSET, "constant"):
        return None
    if settings.schedule == "linear":
        return LambdaLR(optimiser, lambda step: max(0.0, 1 - step / steps))
    return LambdaLR(optimiser, lambda step: (1 + math.cos(math.pi * min(1.0, step / steps))) / 2)
