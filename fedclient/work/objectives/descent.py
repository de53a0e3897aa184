"""The loop of mini-batches that every local algorithm runs, and plain SGD on any loss and any of the tensors.

B samples of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from attune.common.config import TrainSettings
from attune.common.errors import AttuneError
from attune.fedclient.work.objectives.base import PERSONAL, LocalTask, Loss, Tensors, Trained


class TrainingDiverged(AttuneError):
    """The loss is no longer a finite number."""

    kind, exit_code = "training-diverged", 26


class Cancelled(AttuneError):
    """Another order, or the end, has replaced this work."""

    kind = "cancelled"


def descend(
    task: LocalTask,
    tensors: Mapping[str, Tensor],
    loss: Loss,
    names: Collection[str] | None = None,
    settings: TrainSettings | None = None,
    purpose: str = "",
    share: tuple[float, float] = (0.0, 1.0),
    own: bool = False,
) -> Trained:
    """SGD with a fresh optimiser on `loss` from `tensors`, which stay as they are.

    names: what is trained; all that can be if None. settings: the task's if None. purpose, share and own: as for `sweep`.
    Where the task lets none of it move, nothing is done and the loss is not a number. Errors: TrainingDiverged, Cancelled.
    """
    settings = settings or task.settings
    work = leaves(task, tensors, names, own)
    if not any(tensor.requires_grad for tensor in work.values()):
        return Trained(work, math.nan)
    optimiser = sgd(work, settings.lr, settings)

    def step(x_B: Tensor, y_B: Tensor) -> Tensor:
        return take_step(task, optimiser, lambda: loss(work, x_B, y_B), settings)

    mean = sweep(task, step, settings, purpose, share, own)
    return Trained(finished(work, settings), mean)


def last_loss(*stages: Trained) -> float:
    """Of the last stage in which anything moved."""
    return next((stage.loss for stage in reversed(stages) if not math.isnan(stage.loss)), math.nan)


def sweep(
    task: LocalTask,
    step: Callable[[Tensor, Tensor], Tensor],
    settings: TrainSettings | None = None,
    purpose: str = "",
    share: tuple[float, float] = (0.0, 1.0),
    own: bool = False,
) -> float:
    """Calls `step` with each mini-batch, which returns its loss; the sample-weighted mean over the last epoch or all steps.

    purpose: a second sweep in one task has a name, and with it batches and dropout of its own. share: where the task's progress
    begins and ends. own: the tensors computed with are the device's own. Errors: TrainingDiverged if the loss is not finite;
    Cancelled between two batches.
    """
    settings, samples = settings or task.settings, len(task.x)
    per_epoch = -(-samples // settings.batch_size)
    steps = settings.local_steps or settings.local_epochs * per_epoch
    counted_from = 0 if settings.local_steps else steps - per_epoch
    total = torch.zeros((), device=task.device, dtype=torch.float64 if task.device.type != "mps" else None)
    seen = 0
    task.network.train(still=lambda name: not task.takes(name, own))
    with _fork_rng(task.device, task.seeds(f"dropout {purpose}".strip())):
        for number, index_B in enumerate(batches(samples, settings, task.seeds(f"batches {purpose}".strip()))):
            if number == counted_from:
                total, seen = torch.zeros_like(total), 0
            if task.cancelled():
                raise Cancelled("this work was replaced")
            total += step(*batch_of(task, index_B)) * len(index_B)
            seen += len(index_B)
            if (number + 1) % per_epoch == 0 or number + 1 == steps:
                _check(total, settings)
            task.progress(share[0] + (share[1] - share[0]) * ((number + 1) / steps))
    return float(total) / seen


def batches(samples: int, settings: TrainSettings, seed: int) -> Iterator[Tensor]:
    """Indices (B,) of each step: epochs over seeded permutations, or `local_steps` batches, reshuffled when exhausted.

    The last, incomplete batch of a permutation is used.
    """
    generator = torch.Generator().manual_seed(seed)
    left = settings.local_steps or settings.local_epochs * -(-samples // settings.batch_size)
    while left > 0:
        for index_B in torch.split(torch.randperm(samples, generator=generator), settings.batch_size)[:left]:
            left -= 1
            yield index_B


def batch_of(task: LocalTask, index_B: Tensor) -> tuple[Tensor, Tensor]:
    """The samples and labels at these indices, on the task's device."""
    index_B = index_B.to(task.x.device)
    return task.x[index_B].to(task.device), task.y[index_B].to(task.device)


def leaves(task: LocalTask, tensors: Mapping[str, Tensor], names: Collection[str] | None = None, own: bool = False) -> Tensors:
    """Copies to compute with; those of `names` (None: any) that can be trained and that the task lets move take gradients.

    own: they are the device's own under the model's names.
    """
    trainable = task.network.trainable
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    for name, copy in copies.items():
        if name.removeprefix(PERSONAL) in trainable and (names is None or name in names) and task.takes(name, own):
            copy.requires_grad_()
    return copies


def sgd(work: Mapping[str, Tensor], lr: float, settings: TrainSettings) -> torch.optim.SGD:
    """A fresh optimiser of those tensors of `work` that take gradients."""
    trained = [tensor for tensor in work.values() if tensor.requires_grad]
    return torch.optim.SGD(trained, lr=lr, momentum=settings.momentum, weight_decay=settings.weight_decay)


def take_step(task: LocalTask, optimiser: torch.optim.SGD, loss: Callable[[], Tensor], settings: TrainSettings) -> Tensor:
    """One step on `loss()`, whose detached value is returned."""
    optimiser.zero_grad(set_to_none=True)
    with autocast(task.device, settings):
        value = loss()
    torch.autograd.backward(value)
    if settings.clip_norm:
        nn.utils.clip_grad_norm_(optimiser.param_groups[0]["params"], settings.clip_norm)
    optimiser.step()
    return value.detach()


def finished(work: Mapping[str, Tensor], settings: TrainSettings) -> Tensors:
    """The tensors, detached. Errors: TrainingDiverged if one that was trained is not finite."""
    for tensor in work.values():
        if tensor.requires_grad:
            _check(tensor.detach(), settings)
    return {name: tensor.detach() for name, tensor in work.items()}


def autocast(device: torch.device, settings: TrainSettings) -> Any:
    """The precision that a forward pass runs in."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if settings.mixed_precision == "bf16" else nullcontext()


@contextmanager
def _fork_rng(device: torch.device, seed: int) -> Iterator[None]:
    """Inside, dropout draws from `seed`; no other random numbers change."""
    if device.type == "cpu":  # torch.manual_seed tells every kind of accelerator too, also where there is none
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield
        return
    cuda = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(seed)
        yield


def _check(values: Tensor, settings: TrainSettings) -> None:
    if not torch.isfinite(values).all():
        raise TrainingDiverged(
            f"the loss or the weights are not finite any more (lr {settings.lr:g}, momentum {settings.momentum:g}): "
            "lower train.lr or set train.clip_norm on the server"
        )
