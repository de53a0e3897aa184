"""The mini-batches of many devices, step by step, as one tensor: each device draws what it would draw by itself.

D devices, S steps, B samples of the widest batch. A narrower batch is padded with a sample of its own that has no weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from attune.common.config import TrainSettings
from attune.fedclient.work.objectives.base import Batch
from attune.fedclient.work.objectives.descent import Descent

WINDOW_BYTES = 32 << 20  # of samples that are gathered at a time


@dataclass(frozen=True)
class Drawn:
    """All batches of one device's descent."""

    index: Tensor  # (S, B) int64, into the device's samples
    weight: Tensor  # (S, B) float64: 1 / (samples of the batch), and 0 for padding
    size: Tensor  # (S,) float64: samples of each batch


def drawn(samples: int, settings: TrainSettings, seed: int) -> Drawn:
    """What `batches` draws with these arguments."""
    steps, position_SB, weight_SB, size_S = _layout(samples, settings.batch_size, settings.local_epochs, settings.local_steps)
    generator = torch.Generator().manual_seed(seed)
    epochs = -(-steps // -(-samples // settings.batch_size))
    flat = torch.cat([torch.randperm(samples, generator=generator) for _ in range(epochs)])
    return Drawn(flat[position_SB], weight_SB, size_S)


@lru_cache(maxsize=512)
def _layout(samples: int, batch_size: int, local_epochs: int, local_steps: int) -> tuple[int, Tensor, Tensor, Tensor]:
    """(steps; where each batch lies in all permutations, end to end, (S, B); its weights (S, B); its size (S,))."""
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
        self.drawn = [drawn(len(job.task.x), job.settings, job.batch_seed(purpose)) for job in jobs]
        self._width = max(each.index.shape[1] for each in self.drawn)

    def __repr__(self) -> str:
        return f"Batches({len(self._jobs)} devices, {self._width} wide)"

    def __iter__(self) -> Iterator[Batch]:
        """For each step x (D, B, ...), y (D, B, ...) and weight (D, B) of the devices that have such a step: ever fewer."""
        steps = [len(each.size) for each in self.drawn]
        task = self._jobs[0].task
        each = self._width * max(1, task.x[:1].nbytes)
        first = 0
        while first < steps[0]:
            active = sum(count > first for count in steps)
            last = min(steps[0], first + max(1, WINDOW_BYTES // (active * each)))
            window = self._window(active, first, last)
            for step in range(first, last):
                k = sum(count > step for count in steps)
                x, y, weight = (each[:k, step - first] for each in window)
                yield Batch(x, y, weight)
            first = last

    def _window(self, active: int, first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
        """x, y (D, S, B, ...) and weight (D, S, B) of steps `first` to `last`; undefined behind the last step of a device."""
        task, shape = self._jobs[0].task, (active, last - first, self._width)
        x = torch.empty((*shape, *task.x.shape[1:]), dtype=task.x.dtype, device=task.device)
        y = torch.empty((*shape, *task.y.shape[1:]), dtype=task.y.dtype, device=task.device)
        weight = torch.zeros(shape, dtype=self._precision, device=task.device)
        for at, (job, found) in enumerate(zip(self._jobs[:active], self.drawn, strict=False)):
            index_SB, weight_SB = found.index[first:last], found.weight[first:last]
            steps, width = index_SB.shape
            if width < self._width:
                index_SB = torch.cat([index_SB, index_SB[:, :1].expand(steps, self._width - width)], dim=1)
            flat = index_SB.flatten().to(job.task.x.device)
            _gather(job.task.x, flat, x[at, :steps].flatten(0, 1))
            _gather(job.task.y, flat, y[at, :steps].flatten(0, 1))
            weight[at, :steps, :width] = weight_SB
        return x, y, weight


def _gather(samples: Tensor, index: Tensor, place: Tensor) -> None:
    """Writes these samples to `place`, which is contiguous: at once where both are in one memory."""
    if samples.device == place.device:
        torch.index_select(samples, 0, index, out=place)
    else:
        place.copy_(samples[index])
