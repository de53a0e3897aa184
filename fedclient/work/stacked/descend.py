"""Like descents of many devices at once: SGD on stacked tensors, step by step as each device would take it by itself.

D devices, S steps, B samples of the largest batch. Each device draws the mini-batches that it would draw by itself; a smaller
batch is padded with one of its own samples, of weight 0. The devices are ordered by steps, so that those with fewer steps leave
the stack at its end. The numbers of one device depend on no other device. Sums are added in another order than for one device,
so results agree up to rounding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor
from torch.func import vmap

from attune.common.config import TrainSettings
from attune.common.models.body import training_mode
from attune.fedclient.work.executor import Cancelled
from attune.fedclient.work.objectives.base import Batch, Tensors, Trained
from attune.fedclient.work.objectives.descent import Descent, diverged
from attune.fedclient.work.stacked.noisy_stack import NoisyStack

T = TypeVar("T")
R = TypeVar("R")

STACK_BYTES = 1 << 30  # of one stack's tensors with their gradients and momentum
COPIES = 4  # of a tensor: itself, gradient, momentum, and what a step makes of them
PROGRESS_S = 1.0  # seconds between two reports of progress
WINDOW_BYTES = 32 << 20  # of samples that are gathered at a time


def descend(jobs: Sequence[Descent]) -> list[Trained | Exception]:
    """Return the result of each of similar jobs in which a tensor moves, in their order.

    TrainingDiverged and Cancelled are results of single jobs; they end no other job.
    """
    device_bytes = COPIES * sum(tensor.nbytes for tensor in (*jobs[0].tensors.values(), *jobs[0].beside.values()))
    return in_stacks(jobs, device_bytes, lambda job: job.steps, lambda some: Stack(some).run())


def in_stacks(
    jobs: Sequence[T], device_bytes: int, size: Callable[[T], int], compute: Callable[[Sequence[T]], Sequence[R]]
) -> list[R]:
    """Compute similar jobs in stacks of at most STACK_BYTES, the largest jobs first; return the results in the jobs' order."""
    most = max(1, STACK_BYTES // max(1, device_bytes))
    order = sorted(range(len(jobs)), key=lambda at: -size(jobs[at]))
    results: dict[int, R] = {}
    for first in range(0, len(order), most):
        some = order[first : first + most]
        results |= zip(some, compute([jobs[at] for at in some]), strict=True)
    return [results[at] for at in range(len(jobs))]


class Stack:
    """Similar descents as one, those with the most steps first."""

    def __init__(self, jobs: Sequence[Descent]) -> None:
        self._jobs, self._job = jobs, jobs[0]
        self._tensors = stacked([job.tensors for job in jobs])
        self._beside = stacked([job.beside for job in jobs])
        self._momentum: Tensors = {}
        self._noisy = NoisyStack(jobs) if self._job.noise is not None else None
        self._reported_at = -math.inf

    def run(self) -> list[Trained | Exception]:
        """Return the results, as `descend`."""
        job = self._job
        batches = Batches(self._jobs, job.purpose)
        others = iter(Batches(self._jobs, job.ahead.purpose)) if job.ahead else None
        device = job.task.device
        counted = _counted(self._jobs, [plan.size for plan in batches.plans])
        counted = counted.to(device, torch.float64 if device.type != "mps" else torch.float32)
        total_D = torch.zeros_like(counted[0])
        training_mode(job.task.network.model)
        for number, batch in enumerate(batches):
            if all(device_job.task.cancelled() for device_job in self._jobs):
                break
            k = len(batch.x)
            loss_D = self._step(k, batch, next(others) if others else None)
            total_D[:k] += loss_D * counted[number, :k]
            self._tell(number + 1)
        return self._ended(total_D / counted.sum(dim=0).clamp_min(1))

    def _step(self, k: int, batch: Batch, other: Batch | None) -> Tensor:
        """Take one step of the first k devices, and return their losses (k,)."""
        job, settings = self._job, self._job.settings
        tensors, beside = first_devices(self._tensors, k), first_devices(self._beside, k)
        for _ in range(job.repeat):
            at = tensors if job.ahead is None or other is None else self._ahead(tensors, beside, other, job.ahead.rate)
            gradients, loss_D = self._gradients(at, beside, batch)
            for name, change in gradients.items():
                if decay := job.decay(name):
                    change = change.add(tensors[name], alpha=decay)
                if settings.momentum:
                    if name not in self._momentum:
                        self._momentum[name] = torch.zeros_like(self._tensors[name])
                    change = self._momentum[name][:k].mul_(settings.momentum).add_(change)
                tensors[name].sub_(change, alpha=settings.lr)
        if job.follow is not None:
            job.follow(tensors, beside)
        return loss_D

    def _ahead(self, tensors: Tensors, beside: Tensors, batch: Batch, rate: float) -> Tensors:
        """Return the tensors after a step of plain SGD with this rate."""
        gradients, _ = self._gradients(tensors, beside, batch)
        decay, none = self._job.decay, torch.zeros(())
        moving = {name: tensors[name] for name in self._job.moving}
        return tensors | {
            name: tensor - rate * (gradients.get(name, none) + decay(name) * tensor) for name, tensor in moving.items()
        }

    def _gradients(self, tensors: Tensors, beside: Tensors, batch: Batch) -> tuple[Tensors, Tensor]:
        """Return the gradients of the tensors on which the loss depends, clipped for each device, and the losses (k,)."""
        job, clip = self._job, self._job.settings.clip_norm
        if self._noisy is not None:
            return self._noisy.gradients(tensors, beside, batch)
        gradients, loss_D = gradients_of(job, tensors, beside, batch)
        if clip:
            square_D = torch.stack([gradient.flatten(1).square().sum(dim=1) for gradient in gradients.values()]).sum(dim=0)
            scale_D = (clip / (square_D.sqrt() + 1e-6)).clamp(max=1.0)
            gradients = {name: gradient * scale_D.view(-1, *[1] * (gradient.dim() - 1)) for name, gradient in gradients.items()}
        return gradients, loss_D

    def _tell(self, done: int) -> None:
        """Report the progress of all devices, now and then and at the end."""
        now = time.monotonic()
        if now - self._reported_at >= PROGRESS_S or done == self._job.steps:
            self._reported_at = now
            for job in self._jobs:
                job.progress(min(1.0, done / job.steps))

    def _ended(self, loss_D: Tensor) -> list[Trained | Exception]:
        """Return each device's result in separate tensors."""
        finite_D = loss_D.isfinite() if self._noisy is None else torch.ones_like(loss_D, dtype=torch.bool)  # as in `descend`
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
    """Return each device's gradients (D, ...) and losses (D,) for D devices similar to that of `job`.

    A tensor on which the loss does not depend has no gradient. Only the forward pass is mapped over devices: no loss depends on
    another device's tensors, so one backward pass of their sum has all gradients.
    """
    leaves = {name: tensor.detach().requires_grad_(name in job.moving) for name, tensor in tensors.items()}

    def loss(own_tensors: Tensors, kept: Tensors, x: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
        return job.loss(own_tensors, kept, Batch(x, y, weight))

    loss_D: Tensor = vmap(loss)(leaves, beside, *batch)
    return used_gradients(loss_D.sum(), leaves, job.moving), loss_D.detach()


def used_gradients(loss: Tensor, leaves: Tensors, moving: Sequence[str]) -> Tensors:
    """Return the gradients of the moving tensors on which the loss depends."""
    gradients = torch.autograd.grad(loss, [leaves[name] for name in moving], allow_unused=True)
    return {name: gradient for name, gradient in zip(moving, gradients, strict=True) if gradient is not None}


def stacked(devices: Sequence[Mapping[str, Tensor]]) -> Tensors:
    """Return copies (D, ...) of every tensor."""
    return {name: torch.stack([tensors[name] for tensors in devices]) for name in devices[0]}


def first_devices(tensors: Tensors, k: int) -> Tensors:
    """Return views of the first k devices' tensors."""
    return {name: tensor[:k] for name, tensor in tensors.items()}


def _counted(jobs: Sequence[Descent], sizes: Sequence[Tensor]) -> Tensor:
    """Return the samples of each step whose loss is reported, else 0, (S, D) float64."""
    counted = torch.zeros(max(len(size_S) for size_S in sizes), len(jobs), dtype=torch.float64)
    for at, (job, size_S) in enumerate(zip(jobs, sizes, strict=True)):
        counted[job.counted_from : len(size_S), at] = size_S[job.counted_from :]
    return counted


@dataclass(frozen=True)
class BatchPlan:
    """All batches of one device's descent."""

    index: Tensor  # (S, B) int64, into the device's samples
    weight: Tensor  # (S, B) float64: 1 / (samples of the batch), with noise 1; and 0 for padding
    size: Tensor  # (S,) float64: samples of each batch


def _plan_of(job: Descent, purpose: str) -> BatchPlan:
    if job.noise is None:
        return batch_plan(len(job.task.x), job.settings, job.batch_seed(purpose))
    drawn = list(job.batches(purpose))
    size_S = torch.tensor([len(index_B) for index_B in drawn], dtype=torch.float64)
    index_SB = torch.zeros(len(drawn), max(1, int(size_S.max())), dtype=torch.int64)
    for row_B, index_B in zip(index_SB, drawn, strict=True):
        row_B[: len(index_B)] = index_B
    real_SB = torch.arange(index_SB.shape[1]) < size_S[:, None]
    return BatchPlan(index_SB, real_SB.double(), size_S)


def batch_plan(samples: int, settings: TrainSettings, seed: int) -> BatchPlan:
    """Return what objectives.batches draws with these arguments."""
    steps, position_SB, weight_SB, size_S = _layout(samples, settings.batch_size, settings.local_epochs, settings.local_steps)
    generator = torch.Generator().manual_seed(seed)
    epochs = -(-steps // -(-samples // settings.batch_size))
    flat = torch.cat([torch.randperm(samples, generator=generator) for _ in range(epochs)])
    return BatchPlan(flat[position_SB], weight_SB, size_S)


@lru_cache(maxsize=512)
def _layout(samples: int, batch_size: int, local_epochs: int, local_steps: int) -> tuple[int, Tensor, Tensor, Tensor]:
    """Return (steps; positions of each batch in all permutations end to end, (S, B); its weights (S, B); its size (S,))."""
    per_epoch = -(-samples // batch_size)
    steps = local_steps or local_epochs * per_epoch
    step_S = torch.arange(steps)
    offset_S = step_S % per_epoch * batch_size
    size_S = (samples - offset_S).clamp(max=batch_size)
    place_B = torch.arange(min(batch_size, samples))
    real_SB = place_B < size_S[:, None]
    position_SB = (step_S // per_epoch * samples + offset_S)[:, None] + torch.where(real_SB, place_B, 0)
    return steps, position_SB, real_SB / size_S[:, None].double(), size_S.double()


class Batches:
    """The batches of like descents, those with the most steps first. purpose: as for Descent.batches."""

    def __init__(self, jobs: Sequence[Descent], purpose: str) -> None:
        self._jobs, self._precision = jobs, jobs[0].tensors[jobs[0].moving[0]].dtype
        self.plans = [_plan_of(job, purpose) for job in jobs]
        self._width = max(plan.index.shape[1] for plan in self.plans)

    def __iter__(self) -> Iterator[Batch]:
        """Yield for each step x (D, B, ...), y (D, B, ...) and weight (D, B) of the devices that have such a step."""
        steps = [len(plan.size) for plan in self.plans]
        task = self._jobs[0].task
        step_bytes = self._width * max(1, task.x[:1].nbytes)
        first = 0
        while first < steps[0]:
            active = sum(count > first for count in steps)
            last = min(steps[0], first + max(1, WINDOW_BYTES // (active * step_bytes)))
            window = self._window(active, first, last)
            for step in range(first, last):
                k = sum(count > step for count in steps)
                x, y, weight = (array[:k, step - first] for array in window)
                yield Batch(x, y, weight)
            first = last

    def _window(self, active: int, first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return x, y (D, S, B, ...) and weight (D, S, B) of steps `first` to `last`; undefined after a device's last step."""
        task, shape = self._jobs[0].task, (active, last - first, self._width)
        x = torch.empty((*shape, *task.x.shape[1:]), dtype=task.x.dtype, device=task.device)
        y = torch.empty((*shape, *task.y.shape[1:]), dtype=task.y.dtype, device=task.device)
        weight = torch.zeros(shape, dtype=self._precision, device=task.device)
        for at, (job, plan) in enumerate(zip(self._jobs[:active], self.plans, strict=False)):
            index_SB, weight_SB = plan.index[first:last], plan.weight[first:last]
            steps, width = index_SB.shape
            if width < self._width:
                index_SB = torch.cat([index_SB, index_SB[:, :1].expand(steps, self._width - width)], dim=1)
            flat = index_SB.flatten().to(job.task.x.device)
            _gather(job.task.x, flat, x[at, :steps].flatten(0, 1))
            _gather(job.task.y, flat, y[at, :steps].flatten(0, 1))
            weight[at, :steps, :width] = weight_SB
        return x, y, weight


def _gather(samples: Tensor, index: Tensor, place: Tensor) -> None:
    """Write these samples to `place`, which is contiguous; in one operation if both are in one memory."""
    if samples.device == place.device:
        torch.index_select(samples, 0, index, out=place)
    else:
        place.copy_(samples[index])
