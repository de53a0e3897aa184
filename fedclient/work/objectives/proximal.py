"""The loss plus a pull towards what the server sent (FedProx, FedMCSA)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from attune.common.methods.settings.objectives import ProximalSettings
from attune.fedclient.work.objectives.base import LocalTask, Objective, Trained
from attune.fedclient.work.objectives.descent import descend


class Proximal(Objective):
    """f_i(theta) + mu/2 * ||theta - received||^2 over the tensors received (FedProx eq. 2; FedMCSA's lambda is mu)."""

    keeps_received = True

    def __init__(self, settings: ProximalSettings) -> None:
        self._mu = settings.mu

    def __repr__(self) -> str:
        return f"Proximal(mu={self._mu})"

    def run(self, task: LocalTask) -> Trained:
        """Private parameters and running statistics have no centre to be pulled to, so they have no term."""

        def loss(tensors: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return pulled(task.cross_entropy(tensors, x, y), tensors, task.received, self._mu)

        return descend(task, task.start, loss)


def pulled(loss: Tensor, tensors: Mapping[str, Tensor], centre: Mapping[str, Tensor], mu: float) -> Tensor:
    """loss + mu/2 * ||tensors - centre||^2 over the trained tensors that have a centre, which takes no gradient."""
    if mu == 0:
        return loss
    for name, tensor in tensors.items():
        if tensor.requires_grad and name in centre:
            loss = loss + mu / 2 * (tensor - centre[name].detach()).square().sum()
    return loss
