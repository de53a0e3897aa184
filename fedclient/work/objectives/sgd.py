"""Objectives of plain descent: all of the model at once, one step ahead (MAML), one part after the other, or one part alone.

Fallah, Mokhtari, Ozdaglar, 'Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach', NeurIPS 2020 (Per-FedAvg, the variant FO).
Collins, Hassani, Mokhtari, Shakkottai, 'Exploiting Shared Representations for Personalized Federated Learning', ICML 2021
(FedRep).
"""

from __future__ import annotations

import msgspec

from attune.common.methods.settings.objectives import AlternatingSettings, FrozenPrivateSettings, MamlSettings, SgdSettings
from attune.fedclient.work.job import Jobs
from attune.fedclient.work.objectives.base import LocalTask, Objective, Trained
from attune.fedclient.work.objectives.descent import Ahead, Descent, last_loss


class Sgd(Objective[SgdSettings]):
    """f_i(theta): mean cross-entropy of the mini-batch."""

    def work(self, task: LocalTask) -> Jobs[Trained]:
        trained: Trained = yield Descent(task, task.settings, task.start, task.plain)
        return trained


class Maml(Objective[MamlSettings]):
    """theta <- theta - beta * grad f(theta - alpha * grad f(theta; one batch); another batch)."""

    def work(self, task: LocalTask) -> Jobs[Trained]:
        """Train with as many pairs of batches as SGD would take batches. The reported loss is that after the inner step."""
        alpha, beta = (rate or task.settings.lr for rate in (self._settings.alpha, self._settings.beta))
        outer = msgspec.structs.replace(task.settings, lr=beta)
        trained: Trained = yield Descent(task, outer, task.start, task.plain, ahead=Ahead(alpha, "inner"))
        return trained


class FrozenPrivate(Objective[FrozenPrivateSettings]):
    """SGD on all but the private part, which keeps its first value.

    Oh, Kim, Yun, 'FedBABU: Toward Enhanced Representation for Federated Image Classification', ICLR 2022.
    """

    def work(self, task: LocalTask) -> Jobs[Trained]:
        rest = {name for name in task.start if task.kinds.get(name) != "private"}
        trained: Trained = yield Descent(task, task.settings, task.start, task.plain, names=rest)
        return trained


class Alternating(Objective[AlternatingSettings]):
    """SGD on the private part with the rest frozen, then on the rest with the private part frozen."""

    def work(self, task: LocalTask) -> Jobs[Trained]:
        """Train the private part, then the rest.

        The reported loss is that of the rest's last epoch; running statistics go on.
        """
        head_epochs, body_epochs = self._settings.head_epochs, self._settings.body_epochs
        private = {name for name in task.start if task.kinds.get(name) == "private"}
        turn = head_epochs / (head_epochs + body_epochs)
        head = msgspec.structs.replace(task.settings, local_epochs=head_epochs, local_steps=0)
        body = msgspec.structs.replace(head, local_epochs=body_epochs)
        first: Trained = yield Descent(task, head, task.start, task.plain, names=private, purpose="head", share=(0.0, turn))
        rest = task.start.keys() - private
        second: Trained = yield Descent(task, body, first.tensors, task.plain, names=rest, share=(turn, 1.0))
        return Trained(second.tensors, last_loss(first, second))
