"""Steps with noise of many devices at once: each device's gradients are clipped for each of its samples, and get its own noise.

D devices, B samples of the largest batch, P positions of a sample, O and I outputs and inputs of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import vmap

from attune.fedclient.work.objectives.base import Batch, Tensors
from attune.fedclient.work.objectives.descent import Descent
from attune.fedclient.work.private.noisy_steps import NoisyGradients
from attune.fedclient.work.private.unit_gradients import OtherRows, by_sample, clipped_layers, clipped_sum, joined, recording


def against_noise(job: Descent) -> str:
    """Return why devices that train with noise go one by one; empty if they need not."""
    if job.noise is None:
        return ""
    if job.noise.groups is not None:
        return "gradients are clipped by groups of samples"
    rest = NoisyGradients(job).split.rest
    return f"the gradient of {rest[0]} is computed sample by sample" if rest else ""


class NoisyStack:
    """Gradients of similar descents with noise, whose tensors all belong to linear layers."""

    def __init__(self, jobs: Sequence[Descent]) -> None:
        self._devices = [NoisyGradients(job) for job in jobs]
        self._job, self._paths = jobs[0], self._devices[0].split.linear
        self._sizes = self._tried()

    def gradients(self, tensors: Tensors, beside: Tensors, batch: Batch) -> tuple[Tensors, Tensor]:
        """Return the gradients with noise (D, ...) and the mean losses (D,) of a step.

        Args:
            tensors: Of each device, (D, ...).
            beside: What else the loss needs, (D, ...).
            batch: x (D, B, ...), y (D, B, ...), and the weight (D, B): 1 for a sample, and 0 for padding.
        """
        count, width = batch.x.shape[:2]
        like = tensors[self._job.moving[0]]
        taps = {
            path: tuple(like.new_zeros(count, width, *size, requires_grad=True) for size in sizes)
            for path, sizes in self._sizes.items()
        }
        try:
            value_D, inputs = vmap(self._passed)(tensors, beside, batch.x, batch.y, batch.weight, taps)
        except OtherRows:  # in a batch of this size
            return self._noisy(*self._by_sample(tensors, beside, batch), tensors, beside, batch)
        flat = [tap for path in self._sizes for tap in taps[path]]
        deltas = iter(torch.autograd.grad(value_D.sum(), flat, materialize_grads=True))
        layers = {path: (joined(inputs[path], 1), joined([next(deltas) for _ in taps[path]], 1)) for path in self._sizes}
        sums = clipped_layers(layers, self._job.moving, self._job.noise.clip if self._job.noise else 0.0)
        sums |= {name: torch.zeros_like(tensors[name]) for name in self._job.moving if name not in sums}
        return self._noisy(sums, value_D.detach(), tensors, beside, batch)

    def _by_sample(self, tensors: Tensors, beside: Tensors, batch: Batch) -> tuple[Tensors, Tensor]:
        """Return the clipped sums (D, ...) and the losses (D,), one sample after the other."""
        job, sums, losses = self._job, list[Tensors](), list[Tensor]()
        for at, weight_B in enumerate(batch.weight if batch.weight is not None else torch.ones(batch.x.shape[:2])):
            some = Batch(batch.x[at][weight_B > 0], batch.y[at][weight_B > 0])
            of_model, of_device = ({name: tensor[at] for name, tensor in given.items()} for given in (tensors, beside))
            loss, clip = self._devices[0].loss, job.noise.clip if job.noise else 0.0
            result = clipped_sum(
                job.task.network, loss, of_model, of_device, job.moving, some, clip, None, by_sample(job.moving)
            )
            sums.append(result[0])
            losses.append(result[1])
        return {name: torch.stack([of_device[name] for of_device in sums]) for name in job.moving}, torch.stack(losses)

    def _noisy(self, sums: Tensors, value_D: Tensor, tensors: Tensors, beside: Tensors, batch: Batch) -> tuple[Tensors, Tensor]:
        """Return what `gradients` returns, of clipped sums and losses."""
        noisy = [
            device.noisy({name: sums[name][at] for name in self._job.moving})
            for at, device in enumerate(self._devices[: len(value_D)])
        ]
        together = {name: torch.stack([gradients[name] for gradients in noisy]) for name in self._job.moving}
        loss_D = value_D / batch.weight.sum(dim=1).clamp_min(1) if batch.weight is not None else value_D
        return self._with_penalty(together, tensors, beside), loss_D

    def _passed(
        self,
        tensors: Tensors,
        beside: Tensors,
        x: Tensor,
        y: Tensor,
        weight: Tensor | None,
        taps: dict[str, tuple[Tensor, ...]],
    ) -> tuple[Tensor, dict[str, tuple[Tensor, ...]]]:
        """Return one device's loss, and what enters each layer at each call."""
        with recording(self._job.task.network, self._paths, len(x), taps) as record:
            value = self._devices[0].loss(tensors, beside, Batch(x, y, weight))
        return value, {path: tuple(calls) for path, calls in record.inputs.items()}

    def _tried(self) -> dict[str, list[torch.Size]]:
        """Return the sizes, without that of the batch, of what leaves each layer at each call."""
        job, some = self._job, self._devices[0].drawn()
        with torch.no_grad(), recording(job.task.network, self._paths, len(some.x)) as record:
            self._devices[0].loss(job.tensors, job.beside, some)
        return {path: [tap.shape[1:] for tap in calls] for path, calls in record.taps.items()}

    def _with_penalty(self, gradients: Tensors, tensors: Tensors, beside: Tensors) -> Tensors:
        penalty = self._job.penalty
        if penalty is None:
            return gradients
        leaves = {name: tensor.detach().requires_grad_(name in gradients) for name, tensor in tensors.items()}
        value_D = vmap(penalty)(leaves, beside)
        added = torch.autograd.grad(value_D.sum(), [leaves[name] for name in gradients], materialize_grads=True)
        return {name: gradient + more for (name, gradient), more in zip(gradients.items(), added, strict=True)}
