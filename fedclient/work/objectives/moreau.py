"""The Moreau envelope: Dinh, Tran, Nguyen, 'Personalized Federated Learning with Moreau Envelopes', NeurIPS 2020 (pFedMe)."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from torch import Tensor

from attune.common.methods.settings.objectives import MoreauSettings
from attune.fedclient.work.job import Jobs
from attune.fedclient.work.objectives.base import LocalTask, Objective, Tensors, Trained, personal, split
from attune.fedclient.work.objectives.descent import Descent
from attune.fedclient.work.objectives.network import Network
from attune.fedclient.work.objectives.proximal import pulled_loss


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
