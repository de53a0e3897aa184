"""The trained model itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from common.objectives.base import Forward
from common.predictors.settings import ModelSettings


class Model:
    """The model's own logits."""

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings

    def __repr__(self) -> str:
        return "Model()"

    def logits(self, forward: Forward, params: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return forward(params, x)
