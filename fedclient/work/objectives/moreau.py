"""The Moreau envelope: Dinh, Tran, Nguyen, 'Personalized Federated Learning with Moreau Envelopes', NeurIPS 2020 (pFedMe)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attune.common.methods.settings.objectives import MoreauSettings
from attune.fedclient.work.objectives.base import LocalTask, Objective, Tensors, Trained, personal, split
from attune.fedclient.work.objectives.descent import finished, leaves, sgd, sweep, take_step
from attune.fedclient.work.objectives.network import Network
from attune.fedclient.work.objectives.proximal import pulled


class Moreau(Objective):
    """For each batch: K steps of theta on f_i(theta) + mu/2 * ||theta - w||^2, then w <- w - mu * lr * (w - theta).

    w is the model that is exchanged, theta (the extras) the personal one. mu is the paper's lambda.
    """

    def __init__(self, settings: MoreauSettings) -> None:
        self._settings = settings

    def __repr__(self) -> str:
        return f"Moreau(mu={self._settings.mu}, inner_steps={self._settings.inner_steps})"

    def extras(self, tensors: Mapping[str, Tensor], network: Network) -> Tensors:
        """theta, a whole model."""
        return personal(tensors)

    def run(self, task: LocalTask) -> Trained:
        """theta starts an order at w, as in the published code; where w may not move, it goes on from itself.

        Running statistics are theta's, and w takes them over.
        """
        mu, settings = self._settings.mu, task.settings
        model, kept = split(task.start)
        start = {name: tensor if task.takes(name) else kept[name] for name, tensor in model.items()}
        theta, centre = leaves(task, start, own=True), leaves(task, model, names=())
        optimiser = sgd(theta, self._settings.personal_lr or settings.lr, settings)

        def step(x: Tensor, y: Tensor) -> Tensor:
            for _ in range(self._settings.inner_steps):
                loss = take_step(task, optimiser, lambda: pulled(task.cross_entropy(theta, x, y), theta, centre, mu), settings)
            with torch.no_grad():
                for name, tensor in theta.items():
                    if tensor.requires_grad and task.takes(name):
                        centre[name] -= mu * settings.lr * (centre[name] - tensor)
            return loss

        mean = sweep(task, step, own=True)
        own = finished(theta, settings)
        shared = {name: centre[name] if theta[name].requires_grad else tensor for name, tensor in own.items()}
        return Trained(shared | personal(own), mean)
