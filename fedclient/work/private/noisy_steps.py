"""Steps with noise: DP-SGD on one device.

Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang, 'Deep Learning with Differential Privacy', CCS 2016 (Algorithm 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attune.common.privacy.noise import NoiseStream
from attune.fedclient.work.objectives.base import Batch, Loss, Tensors
from attune.fedclient.work.private.order_noise import OrderNoise
from attune.fedclient.work.private.unit_gradients import PROBED, Split, clipped_sum, split_of

if TYPE_CHECKING:
    from attune.fedclient.work.objectives.descent import Descent


def with_noise(
    sums: Mapping[str, Tensor], moving: Sequence[str], noise: OrderNoise, stream: NoiseStream, expected: float
) -> Tensors:
    """Return the sums of clipped gradients with noise, divided by the expected number of samples of a step.

    The noise is added in float64, in the place of the sums. A tensor without a gradient gets noise too.

    Args:
        sums: What `clipped_sum` returns.
        moving: The trained tensors, in the order in which noise is drawn.
        noise: The order's noise.
        stream: Where normals come from.
        expected: Samples of a step on average.
    """
    if not noise.noise:
        return {name: sums[name] / expected for name in moving}
    noisy, deviation = {}, noise.clip * noise.noise / expected
    for name in moving:
        mean, filled = sums[name].cpu().reshape(-1), 0
        for piece in stream.pieces(len(mean)):
            some = mean[filled : filled + len(piece)]
            some.copy_(piece.mul_(deviation).add_(some, alpha=1 / expected))
            filled += len(piece)
        noisy[name] = mean.view(sums[name].shape).to(sums[name].device)
    return noisy


class NoisyGradients:
    """Gradients of one device's descent, with noise.

    Attributes:
        loss: The weighted sum of the samples' losses, without the method's own term.
    """

    def __init__(self, job: Descent) -> None:
        assert job.noise is not None  # noqa: S101 - for mypy
        self._job, self._noise = job, job.noise
        self.loss: Loss = job.loss if job.penalty is None else job.task.plain
        self._stream = job.noise.stream("noise", job.purpose)
        self._expected = float(min(job.settings.batch_size, len(job.task.x)))

    def __repr__(self) -> str:
        return f"NoisyGradients({self._job!r})"

    @cached_property
    def split(self) -> Split:
        """How the gradients are computed."""
        job = self._job
        return split_of(job.task.network, self.loss, dict(job.tensors), dict(job.beside), job.moving, self.some())

    def set_on(self, tensors: Tensors, beside: Tensors, batch: Batch, index_B: Tensor) -> Tensor:
        """Give the moving tensors their gradients for a batch, and return the mean loss.

        Args:
            tensors: The model's tensors; those that move are leaves.
            beside: What else the loss needs.
            batch: The samples.
            index_B: Their places among the device's samples.
        """
        job, groups = self._job, self._noise.groups
        group_B = None if groups is None else torch.unique(groups[index_B], return_inverse=True)[1].to(batch.x.device)
        sums, loss = clipped_sum(
            job.task.network, self.loss, tensors, beside, job.moving, batch, self._noise.clip, group_B, self.split
        )
        for name, gradient in with_penalty(self.noisy(sums), job, tensors, beside).items():
            tensors[name].grad = gradient
        return loss / max(1, len(batch.x))

    def noisy(self, sums: Mapping[str, Tensor]) -> Tensors:
        """Return sums of clipped gradients with the noise of the next step, divided by the samples of a step on average."""
        return with_noise(sums, self._job.moving, self._noise, self._stream, self._expected)

    def some(self) -> Batch:
        """Return a few samples."""
        task = self._job.task
        return Batch(task.x[:PROBED].to(task.device), task.y[:PROBED].to(task.device))


def with_penalty(gradients: Tensors, job: Descent, tensors: Tensors, beside: Tensors) -> Tensors:
    """Return the gradients with those of the method's own term, which reads no sample and so needs no noise."""
    if job.penalty is None:
        return gradients
    leaves = {name: tensor.detach().requires_grad_(name in gradients) for name, tensor in tensors.items()}
    value = job.penalty(leaves, beside)
    if not value.requires_grad:
        return gradients
    added = torch.autograd.grad(value, [leaves[name] for name in gradients], materialize_grads=True)
    return {name: gradient + more for (name, gradient), more in zip(gradients.items(), added, strict=True)}
