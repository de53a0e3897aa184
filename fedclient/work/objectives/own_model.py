"""Objectives with a model of the device's own beside the shared one.

Li, Hu, Beirami, Smith, 'Ditto: Fair and Robust Federated Learning Through Personalization', ICML 2021 (Algorithm 1).
Liu, Hu, Wu, Smith, 'On Privacy and Personalization in Cross-Silo Federated Learning', NeurIPS 2022 (MR-MTL).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from attune.common.methods.settings.objectives import MeanRegularisedSettings, OwnModelSettings
from attune.fedclient.work.job import Jobs
from attune.fedclient.work.objectives.base import LocalTask, Objective, Tensors, Trained, personal, split
from attune.fedclient.work.objectives.descent import Descent, TrainingDiverged, last_loss
from attune.fedclient.work.objectives.network import Network
from attune.fedclient.work.objectives.proximal import pull, pulled_loss


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
