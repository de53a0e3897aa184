"""The loss plus a pull towards what the server sent (FedProx, FedMCSA)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from attune.common.methods.settings.objectives import ProximalSettings
from attune.fedclient.work.job import Jobs
from attune.fedclient.work.objectives.base import Batch, LocalTask, Loss, Objective, Trained
from attune.fedclient.work.objectives.descent import Descent, Penalty


class Proximal(Objective[ProximalSettings]):
    """f_i(theta) + mu/2 * ||theta - received||^2 over the tensors received (FedProx eq. 2; FedMCSA's lambda is mu)."""

    keeps_received = True

    def work(self, task: LocalTask) -> Jobs[Trained]:
        """Train with the proximal term. Private parameters and running statistics have no centre, so they have no term."""
        centre = {name: task.received[name] for name in task.movable(task.start) if name in task.received}
        loss, penalty = pulled_loss(task, self._settings.mu), pull(self._settings.mu)
        trained: Trained = yield Descent(task, task.settings, task.start, loss, centre, penalty=penalty)
        return trained


def pulled_loss(task: LocalTask, mu: float) -> Loss:
    """Return the task's plain loss with a pull to the tensors beside."""

    def loss(tensors: Mapping[str, Tensor], centre: Mapping[str, Tensor], batch: Batch) -> Tensor:
        return pulled(task.mean_loss(tensors, *batch), tensors, centre, mu)

    return loss


def pull(mu: float) -> Penalty | None:
    """Return the pull to the tensors beside, without the loss; None without a pull."""
    if mu == 0:
        return None

    def penalty(tensors: Mapping[str, Tensor], centre: Mapping[str, Tensor]) -> Tensor:
        nothing = next(iter(tensors.values())).new_zeros(())
        return pulled(nothing, tensors, centre, mu)

    return penalty


def pulled(loss: Tensor, tensors: Mapping[str, Tensor], centre: Mapping[str, Tensor], mu: float) -> Tensor:
    """Return loss + mu/2 * ||tensors - centre||^2 over the tensors that have a centre. The centre takes no gradient."""
    if mu == 0:
        return loss
    for name, at in centre.items():
        loss = loss + mu / 2 * (tensors[name] - at.detach()).square().sum()
    return loss
