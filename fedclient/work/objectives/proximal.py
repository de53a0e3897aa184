"""Objectives that pull a model towards another one: to what the server sent, or the device's own model beside the shared one.

FedProx and FedMCSA pull to what the server sent. With a model of the device's own:
Li, Hu, Beirami, Smith, 'Ditto: Fair and Robust Federated Learning Through Personalization', ICML 2021 (Algorithm 1).
Liu, Hu, Wu, Smith, 'On Privacy and Personalization in Cross-Silo Federated Learning', NeurIPS 2022 (MR-MTL).
Dinh, Tran, Nguyen, 'Personalized Federated Learning with Moreau Envelopes', NeurIPS 2020 (pFedMe).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from torch import Tensor

from attune.common.methods.settings.objectives import (
    MeanRegularisedSettings,
    MoreauSettings,
    OwnModelSettings,
    ProximalSettings,
)
from attune.fedclient.work.executor import Jobs
from attune.fedclient.work.objectives.base import Batch, LocalTask, Loss, Network, Objective, Tensors, Trained, personal, split
from attune.fedclient.work.objectives.descent import Descent, Penalty, TrainingDiverged, last_loss


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


class Moreau(Objective[MoreauSettings]):
    """For each batch: K steps of theta on f_i(theta) + mu/2 * ||theta - w||^2, then w <- w - mu * lr * (w - theta).

    w is the model that is exchanged, theta (the extras) the personal one. mu is the paper's lambda.
    """

    def extras(self, tensors: Mapping[str, Tensor], network: Network) -> Tensors:
        """Return theta, a whole model."""
        return personal(tensors)

    def work(self, task: LocalTask) -> Jobs[Trained]:
        """Train w and theta.

        theta starts an order at w, as in the published code. If w may not move, theta goes on from itself. Running statistics
        are theta's, and w takes them over.
        """
        mu, rate = self._settings.mu, task.settings.lr
        model, kept = split(task.start)
        start = {name: tensor if task.takes(name) else kept[name] for name, tensor in model.items()}
        centre = {name: model[name] for name in task.movable(start, is_own=True)}

        def follow(theta: Mapping[str, Tensor], w: Mapping[str, Tensor]) -> None:
            for name, tensor in w.items():
                if task.takes(name):
                    tensor -= mu * rate * (tensor - theta[name])

        inner = msgspec.structs.replace(task.settings, lr=self._settings.personal_lr or rate)
        trained: Trained = yield Descent(
            task, inner, start, pulled_loss(task, mu), centre, is_own=True, repeat=self._settings.inner_steps, follow=follow
        )
        return Trained(trained.tensors | dict(trained.beside) | personal(trained.tensors), trained.loss)


class OwnModel(Objective[OwnModelSettings]):
    """SGD on the shared model; then SGD on f_i(v) + mu/2 * ||v - received||^2 for the own model v. mu is Ditto's lambda."""

    keeps_received = True

    def extras(self, tensors: Mapping[str, Tensor], network: Network) -> Tensors:
        """Return v, a whole model."""
        return personal(tensors)

    def work(self, task: LocalTask) -> Jobs[Trained]:
        """Train the shared and the own model with as many steps each.

        The reported loss is that of the own model, with its term.
        """
        model, own_tensors = split(task.start)
        centre = {name: task.received[name] for name in task.movable(own_tensors, is_own=True) if name in task.received}
        shared: Trained = yield Descent(task, task.settings, model, task.plain, share=(0.0, 0.5))
        loss, penalty = pulled_loss(task, self._settings.mu), pull(self._settings.mu)
        try:
            kept: Trained = yield Descent(
                task,
                task.settings,
                own_tensors,
                loss,
                centre,
                purpose="own",
                share=(0.5, 1.0),
                is_own=True,
                penalty=penalty,
                stays=True,
            )
        except TrainingDiverged:
            if task.noise is None:
                raise
            kept = Trained(own_tensors, math.nan)  # it has no noise, so a failure of the order would tell of samples
        return Trained(shared.tensors | personal(kept.tensors), last_loss(shared, kept))


class MeanRegularised(Objective[MeanRegularisedSettings]):
    """SGD on f_i(w) + mu/2 * ||w - received||^2 from the device's own w, which is handed in. mu is the paper's lambda."""

    keeps_received = True

    def extras(self, tensors: Mapping[str, Tensor], network: Network) -> Tensors:
        """Return w, a whole model: a device begins at the mean that it is first served."""
        return personal(tensors)

    def work(self, task: LocalTask) -> Jobs[Trained]:
        """Train w. The model that is handed in is w, but for tensors that may not move."""
        model, own_tensors = split(task.start)
        centre = {name: task.received[name] for name in task.movable(own_tensors, is_own=True) if name in task.received}
        loss, penalty = pulled_loss(task, self._settings.mu), pull(self._settings.mu)
        trained: Trained = yield Descent(task, task.settings, own_tensors, loss, centre, is_own=True, penalty=penalty)
        handed_in = {name: trained.tensors[name] if task.takes(name) else tensor for name, tensor in model.items()}
        return Trained(handed_in | personal(trained.tensors), trained.loss)
