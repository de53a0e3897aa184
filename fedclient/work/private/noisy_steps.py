"""Steps with noise: DP-SGD on one device.

Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang, 'Deep Learning with Differential Privacy', CCS 2016 (Algorithm 1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attune.common.privacy.noise import NoiseStream, key_of
from attune.fedclient.work.objectives.base import Batch, Loss, Tensors
from attune.fedclient.work.private.lattice import LatticeStream, lattice_step
from attune.fedclient.work.private.model_trial import ROWS, SEED, drawn_batch, split_of
from attune.fedclient.work.private.unit_gradients import Split, clipped_sum

if TYPE_CHECKING:
    from attune.fedclient.work.objectives.descent import Descent

AT_ONCE = 1 << 14  # units that are drawn at a time


@dataclass
class OrderNoise:
    """Noise of one device in one order.

    Attributes:
        clip: Largest L2 norm of a unit's gradient.
        noise: Deviation of the noise in units of `clip`.
        key: Secret key of this order. No other order has it.
        charged: Steps that the ledger has charged for this order.
        groups: Number of each sample's group, (N,) int64, from 0; None: each sample is a unit of its own.
        metrics: Noise multiplier of the order's metrics; 0: they do not leave the device.
    """

    clip: float
    noise: float
    key: bytes = field(repr=False)
    charged: int
    groups: Tensor | None = None
    metrics: float = 0.0
    taken: int = 0

    def stream(self, *purpose: str) -> NoiseStream:
        """Return the random numbers for one purpose."""
        return NoiseStream(key_of(self.key, *purpose))

    def units(self, samples: int) -> int:
        """Return the number of units of so many samples."""
        return samples if self.groups is None else int(self.groups.max()) + 1

    def batches(self, samples: int, batch_size: int, steps: int, purpose: str) -> Iterator[Tensor]:
        """Yield the indices (B,) of each step: every unit is in it with the same chance, independently; B may be 0.

        Args:
            samples: Samples of the device.
            batch_size: Samples of a step on average.
            steps: Number of steps.
            purpose: Names the draw.

        Raises:
            RuntimeError: So many steps were not charged.
        """
        self.taken += steps
        if self.taken > self.charged:
            raise RuntimeError(f"{self.taken} steps with noise were begun, and {self.charged} are charged")
        stream, units, rate = self.stream("batches", purpose), self.units(samples), rate_of(samples, batch_size)
        many = max(1, AT_ONCE // units)
        for step in range(steps):
            if step % many == 0:
                drawn_SU = stream.uniform(many * units).view(many, units) <= rate
            drawn = drawn_SU[step % many]
            yield torch.nonzero(drawn if self.groups is None else drawn[self.groups]).flatten()


def rate_of(samples: int, batch_size: int) -> float:
    """Return the chance of a unit to be in a step."""
    return min(1.0, batch_size / samples)


def with_noise(
    sums: Mapping[str, Tensor], moving: Sequence[str], noise: OrderNoise, stream: LatticeStream, expected: float
) -> Tensors:
    """Return the sums of clipped gradients with noise, divided by the expected number of samples of a step.

    The sums are rounded to the lattice of the noise, in their place. A tensor without a gradient gets noise too.

    Args:
        sums: What `clipped_sum` returns.
        moving: The trained tensors, in the order in which noise is drawn.
        noise: The order's noise.
        stream: Where the noise comes from.
        expected: Samples of a step on average.
    """
    if not noise.noise:
        return {name: sums[name] / expected for name in moving}
    numbers = [sums[name].cpu() for name in moving]
    sizes = [tensor.numel() for tensor in numbers]
    step = lattice_step(noise.clip, noise.noise, sum(sizes))
    drawn = torch.split(stream.numbers(sum(sizes)), sizes)
    torch._foreach_mul_(numbers, 1 / step)
    torch._foreach_round_(numbers)
    # What is rounded here is the sum of two whole numbers.
    torch._foreach_add_(numbers, [some.view_as(tensor) for some, tensor in zip(drawn, numbers, strict=True)])
    torch._foreach_mul_(numbers, step / expected)
    return {name: tensor.to(sums[name].device) for name, tensor in zip(moving, numbers, strict=True)}


class NoisyGradients:
    """Gradients of one device's descent, with noise.

    Attributes:
        loss: The weighted sum of the samples' losses, without the method's own term.
    """

    def __init__(self, job: Descent) -> None:
        assert job.noise is not None  # noqa: S101 - for mypy
        self._job, self._noise = job, job.noise
        self.loss: Loss = job.loss if job.penalty is None else job.task.plain
        self._stream = LatticeStream(job.noise.stream("noise", job.purpose))
        self._expected = float(min(job.settings.batch_size, len(job.task.x)))

    @cached_property
    def split(self) -> Split:
        """How the gradients are computed."""
        job = self._job
        like, tensors, beside = self._like(), dict(job.tensors), dict(job.beside)
        return split_of(job.task.network, self.loss, tensors, beside, job.moving, like, int(self._expected))

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

    def drawn(self) -> Batch:
        """Return a few drawn samples."""
        return drawn_batch(self._job.task.network, self._job.tensors, self._like(), ROWS, SEED)

    def _like(self) -> Batch:
        """Return a sample, of which shapes and types are taken."""
        task = self._job.task
        return Batch(task.x[:1].to(task.device), task.y[:1].to(task.device))


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
