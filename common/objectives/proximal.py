"""The loss plus a pull towards what the server sent (FedProx, FedMCSA)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from common.objectives.base import Forward, mean_cross_entropy
from common.objectives.settings import ProximalSettings


class Proximal:
    """f_i(theta) + mu/2 * ||theta - received||^2 over the tensors received (FedProx eq. 2; FedMCSA's lambda is mu)."""

    def __init__(self, settings: ProximalSettings) -> None:
        self._mu = settings.mu

    def __repr__(self) -> str:
        return f"Proximal(mu={self._mu})"

    def loss(
        self,
        forward: Forward,
        params: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        y: torch.Tensor,
        received: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Private parameters and integer buffers have no centre to be pulled to, so they have no term."""
        loss = mean_cross_entropy(forward(params, x), y)
        if self._mu == 0:
            return loss
        for name, value in params.items():
            if name in received and value.is_floating_point():
                loss = loss + self._mu / 2 * (value - received[name].detach()).square().sum()
        return loss
