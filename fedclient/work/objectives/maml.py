"""First-order MAML: Fallah, Mokhtari, Ozdaglar, 'Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach', NeurIPS 2020 (Per-FedAvg, the variant FO)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import torch
from torch import Tensor

from attune.common.config import TrainSettings
from attune.common.methods.settings.objectives import MamlSettings
from attune.fedclient.work.objectives.base import LocalTask, Objective, Trained
from attune.fedclient.work.objectives.descent import batch_of, batches, descend


class Maml(Objective):
    """theta <- theta - beta * grad f(theta - alpha * grad f(theta; one batch); another batch)."""

    def __init__(self, settings: MamlSettings) -> None:
        self._settings = settings

    def __repr__(self) -> str:
        return f"Maml(alpha={self._settings.alpha}, beta={self._settings.beta})"

    def run(self, task: LocalTask) -> Trained:
        """As many pairs of batches as SGD would take batches; the loss reported is that behind the inner step."""
        alpha, beta = (rate or task.settings.lr for rate in (self._settings.alpha, self._settings.beta))
        outer = msgspec.structs.replace(task.settings, lr=beta)
        inner_batches = batches(len(task.x), task.settings, task.seeds("batches inner"))

        def loss(tensors: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            trained = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
            inner = task.cross_entropy(tensors, *batch_of(task, next(inner_batches)))
            gradients = torch.autograd.grad(inner, list(trained.values()), materialize_grads=True)
            step = _as_before_prediction(gradients, trained.values(), task.settings)
            # The step is a constant here, so the gradient at its end is the first-order one.
            ahead = {name: trained[name] - alpha * change for name, change in zip(trained, step, strict=True)}
            return task.cross_entropy({**tensors, **ahead}, x, y)

        return descend(task, task.start, loss, settings=outer)


def _as_before_prediction(gradients: Iterable[Tensor], values: Iterable[Tensor], settings: TrainSettings) -> list[Tensor]:
    """The gradients clipped and with decay, as one step of SGD has them: a start that is trained for another step than the one
    that is taken before prediction gets worse with every round."""
    gradients = list(gradients)
    if settings.clip_norm:
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]))
        gradients = [gradient * torch.clamp(settings.clip_norm / (norm + 1e-6), max=1.0) for gradient in gradients]
    decay = settings.weight_decay
    return [gradient + decay * value.detach() for gradient, value in zip(gradients, values, strict=True)]
