"""First-order MAML: Fallah, Mokhtari, Ozdaglar, 'Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach', NeurIPS 2020 (Per-FedAvg, the variant FO)."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor

from common.objectives.base import LocalTask, Objective, Trained
from common.objectives.descent import batch_of, batches, descend
from common.objectives.settings import MamlSettings


class Maml(Objective):
    """theta <- theta - beta * grad f(theta - alpha * grad f(theta; one batch); another batch)."""

    def __init__(self, settings: MamlSettings) -> None:
        self._settings = settings

    def __repr__(self) -> str:
        return f"Maml(alpha={self._settings.alpha}, beta={self._settings.beta})"

    def run(self, task: LocalTask) -> Trained:
        """As many pairs of batches as SGD would take batches; the loss reported is that behind the inner step."""
        alpha = self._settings.alpha or task.settings.lr
        outer = msgspec.structs.replace(task.settings, lr=self._settings.beta)
        inner_batches = batches(len(task.x), task.settings, task.seeds("batches inner"))

        def loss(tensors: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            trained = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
            inner = task.cross_entropy(tensors, *batch_of(task, next(inner_batches)))
            gradients = torch.autograd.grad(inner, list(trained.values()), materialize_grads=True)
            # The step is a constant here, so the gradient at its end is the first-order one.
            ahead = {name: trained[name] - alpha * gradient for name, gradient in zip(trained, gradients, strict=True)}
            return task.cross_entropy({**tensors, **ahead}, x, y)

        return descend(task, task.start, loss, settings=outer)
