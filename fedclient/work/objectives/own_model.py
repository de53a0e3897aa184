"""A model of one's own beside the shared one: Li, Hu, Beirami, Smith, 'Ditto: Fair and Robust Federated Learning Through
Personalization', ICML 2021 (Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from attune.common.methods.settings.objectives import OwnModelSettings
from attune.fedclient.work.objectives.base import LocalTask, Objective, Tensors, Trained, personal, split
from attune.fedclient.work.objectives.descent import descend, last_loss
from attune.fedclient.work.objectives.network import Network
from attune.fedclient.work.objectives.proximal import pulled


class OwnModel(Objective):
    """SGD on the shared model; then SGD on f_i(v) + mu/2 * ||v - received||^2 for the own model v. mu is Ditto's lambda."""

    keeps_received = True

    def __init__(self, settings: OwnModelSettings) -> None:
        self._mu = settings.mu

    def __repr__(self) -> str:
        return f"OwnModel(mu={self._mu})"

    def extras(self, tensors: Mapping[str, Tensor], network: Network) -> Tensors:
        """v, a whole model."""
        return personal(tensors)

    def run(self, task: LocalTask) -> Trained:
        """The loss reported is that of the own model, with its term. Both take as many steps."""

        def loss(tensors: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return pulled(task.cross_entropy(tensors, x, y), tensors, task.received, self._mu)

        model, own = split(task.start)
        shared = descend(task, model, task.cross_entropy, share=(0.0, 0.5))
        kept = descend(task, own, loss, purpose="own", share=(0.5, 1.0), own=True)
        return Trained(shared.tensors | personal(kept.tensors), last_loss(shared, kept))
