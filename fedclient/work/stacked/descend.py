"""Like descents of many devices at once: SGD on stacked tensors, step by step as each device would take it by itself.

D devices, B samples of a batch. Devices with fewer steps leave the stack at its end when they have taken theirs. Nothing of one
device enters the numbers of another. Sums are folded in another order than by itself, so results agree to rounding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.func import vmap

from attune.common.models.body import training_mode
from attune.fedclient.work.objectives.base import Batch, Tensors, Trained
from attune.fedclient.work.objectives.descent import Cancelled, Descent, diverged
from attune.fedclient.work.stacked.batches import Batches

STACK_BYTES = 1 << 30  # of one stack's tensors with their gradients and momentum
COPIES = 4  # of a tensor: itself, gradient, momentum, and what a step makes of them
TOLD_S = 1.0  # seconds between two reports of progress


def descend(jobs: Sequence[Descent]) -> list[Trained | Exception]:
    """What each of like jobs, in which something moves, comes to, in their order.

    TrainingDiverged or Cancelled for those that end so, and for no other.
    """
    each = COPIES * sum(tensor.nbytes for tensor in (*jobs[0].tensors.values(), *jobs[0].beside.values()))
    most = max(1, STACK_BYTES // max(1, each))
    order = sorted(range(len(jobs)), key=lambda at: -jobs[at].steps)
    ended: dict[int, Trained | Exception] = {}
    for first in range(0, len(order), most):
        some = order[first : first + most]
        ended |= zip(some, Stack([jobs[at] for at in some]).run(), strict=True)
    return [ended[at] for at in range(len(jobs))]


class Stack:
    """jobs: like ones, those with the most steps first."""

    def __init__(self, jobs: Sequence[Descent]) -> None:
        self._jobs, self._job = jobs, jobs[0]
        self._tensors = stacked([job.tensors for job in jobs])
        self._beside = stacked([job.beside for job in jobs])
        self._momentum: Tensors = {}
        self._told = -math.inf

    def __repr__(self) -> str:
        return f"<Stack of {len(self._jobs)} x {self._job}>"

    def run(self) -> list[Trained | Exception]:
        """As `descend`."""
        job = self._job
        batches = Batches(self._jobs, job.purpose)
        others = iter(Batches(self._jobs, job.ahead.purpose)) if job.ahead else None
        device = job.task.device
        counted = _counted(self._jobs, [drawn.size for drawn in batches.drawn])
        counted = counted.to(device, torch.float64 if device.type != "mps" else torch.float32)
        total_D = torch.zeros_like(counted[0])
        training_mode(job.task.network.model)
        for number, batch in enumerate(batches):
            if all(each.task.cancelled() for each in self._jobs):
                break
            k = len(batch.x)
            loss_D = self._step(k, batch, next(others) if others else None)
            total_D[:k] += loss_D * counted[number, :k]
            self._tell(number + 1)
        return self._ended(total_D / counted.sum(dim=0))

    def _step(self, k: int, batch: Batch, other: Batch | None) -> Tensor:
        """One step of the first k devices; their losses (k,)."""
        job, settings = self._job, self._job.settings
        tensors, beside = _first(self._tensors, k), _first(self._beside, k)
        for _ in range(job.repeat):
            at = tensors if job.ahead is None or other is None else self._ahead(tensors, beside, other, job.ahead.rate)
            gradients, loss_D = self._gradients(at, beside, batch)
            for name, change in gradients.items():
                if settings.weight_decay:
                    change = change.add(tensors[name], alpha=settings.weight_decay)
                if settings.momentum:
                    if name not in self._momentum:
                        self._momentum[name] = torch.zeros_like(self._tensors[name])
                    change = self._momentum[name][:k].mul_(settings.momentum).add_(change)
                tensors[name].sub_(change, alpha=settings.lr)
        if job.follow is not None:
            job.follow(tensors, beside)
        return loss_D

    def _ahead(self, tensors: Tensors, beside: Tensors, batch: Batch, rate: float) -> Tensors:
        """The tensors after a step of plain SGD with this rate."""
        gradients, _ = self._gradients(tensors, beside, batch)
        decay, none = self._job.settings.weight_decay, torch.zeros(())
        moving = {name: tensors[name] for name in self._job.moving}
        return tensors | {name: tensor - rate * (gradients.get(name, none) + decay * tensor) for name, tensor in moving.items()}

    def _gradients(self, tensors: Tensors, beside: Tensors, batch: Batch) -> tuple[Tensors, Tensor]:
        """The gradients of what the loss depends on, clipped for each device by itself, and the losses (k,)."""
        job, clip = self._job, self._job.settings.clip_norm
        gradients, loss_D = gradients_of(job, tensors, beside, batch)
        if clip:
            square_D = torch.stack([each.flatten(1).square().sum(dim=1) for each in gradients.values()]).sum(dim=0)
            scale_D = (clip / (square_D.sqrt() + 1e-6)).clamp(max=1.0)
            gradients = {name: each * scale_D.view(-1, *[1] * (each.dim() - 1)) for name, each in gradients.items()}
        return gradients, loss_D

    def _tell(self, done: int) -> None:
        """Progress of all, now and then and at the end."""
        now = time.monotonic()
        if now - self._told >= TOLD_S or done == self._job.steps:
            self._told = now
            for job in self._jobs:
                job.task.progress(job.share[0] + (job.share[1] - job.share[0]) * min(1.0, done / job.steps))

    def _ended(self, loss_D: Tensor) -> list[Trained | Exception]:
        """Each device's result, in tensors of its own."""
        finite_D = loss_D.isfinite()
        for name in self._job.moving:
            finite_D &= self._tensors[name].flatten(1).isfinite().all(dim=1)
        parts = {name: self._tensors[name].unbind() for name in self._job.moving}
        followed = {name: tensor.unbind() for name, tensor in self._beside.items()} if self._job.follow else {}
        ended: list[Trained | Exception] = []
        for at, (job, finite, loss) in enumerate(zip(self._jobs, finite_D.tolist(), loss_D.tolist(), strict=True)):
            if job.task.cancelled():
                ended.append(Cancelled("this work was replaced"))
            elif not finite:
                ended.append(diverged(job.settings))
            else:
                tensors = {name: parts[name][at].clone() if name in parts else tensor for name, tensor in job.tensors.items()}
                beside = {name: followed[name][at].clone() if followed else tensor for name, tensor in job.beside.items()}
                ended.append(Trained(tensors, loss, beside))
        return ended


def gradients_of(job: Descent, tensors: Tensors, beside: Tensors, batch: Batch) -> tuple[Tensors, Tensor]:
    """For D devices like that of `job`: the gradient of each one's loss in its tensors (D, ...), and the losses (D,).

    What the loss does not depend on has no gradient. The devices are mapped in the forward pass alone: no loss depends on the
    tensors of another device, so one backward pass of their sum has everybody's gradients.
    """
    leaves = {name: tensor.detach().requires_grad_(name in job.moving) for name, tensor in tensors.items()}

    def loss(own: Tensors, kept: Tensors, x: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
        return job.loss(own, kept, Batch(x, y, weight))

    loss_D: Tensor = vmap(loss)(leaves, beside, *batch)
    found = torch.autograd.grad(loss_D.sum(), [leaves[name] for name in job.moving], allow_unused=True)
    gradients = {name: gradient for name, gradient in zip(job.moving, found, strict=True) if gradient is not None}
    return gradients, loss_D.detach()


def stacked(each: Sequence[Mapping[str, Tensor]]) -> Tensors:
    """(D, ...) of every tensor: copies."""
    return {name: torch.stack([tensors[name] for tensors in each]) for name in each[0]}


def _first(tensors: Tensors, k: int) -> Tensors:
    return {name: tensor[:k] for name, tensor in tensors.items()}


def _counted(jobs: Sequence[Descent], sizes: Sequence[Tensor]) -> Tensor:
    """(S, D) float64: the samples of each step whose loss is reported, else 0."""
    counted = torch.zeros(max(len(size_S) for size_S in sizes), len(jobs), dtype=torch.float64)
    for at, (job, size_S) in enumerate(zip(jobs, sizes, strict=True)):
        counted[job.counted_from : len(size_S), at] = size_S[job.counted_from :]
    return counted
