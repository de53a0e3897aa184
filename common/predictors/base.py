"""The interface of a predictor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from common.objectives.base import Forward


class Predictor(Protocol):
    """How a device scores classes. Constructed with its settings."""

    def logits(self, forward: Forward, params: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """(N, ..., C): the largest is the prediction."""
        ...
