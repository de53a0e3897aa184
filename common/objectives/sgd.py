"""The plain loss: cross-entropy."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from common.objectives.base import Forward, mean_cross_entropy
from common.objectives.settings import SgdSettings


class Sgd:
    """f_i(theta): mean cross-entropy of the mini-batch."""

    def __init__(self, settings: SgdSettings) -> None:
        self._settings = settings

    def __repr__(self) -> str:
        return "Sgd()"

    def loss(
        self,
        forward: Forward,
        params: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        y: torch.Tensor,
        received: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        return mean_cross_entropy(forward(params, x), y)
