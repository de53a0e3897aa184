"""Which samples each step takes, from a seed.

B samples of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attune.common.config import TrainSettings
from attune.fedclient.work.objectives.augment import RANK, augmented
from attune.fedclient.work.objectives.base import Batch, LocalTask


def batch_sizes(samples: int, batch_size: int, joined: bool) -> list[int]:
    """Return the size of each batch of one pass.

    Args:
        samples: Number of samples.
        batch_size: Size of all batches but the last one.
        joined: A last batch of one sample joins the batch before it.
    """
    full, rest = divmod(samples, batch_size)
    if joined and full and rest == 1:
        return [batch_size] * (full - 1) + [batch_size + 1]
    return [batch_size] * full + [rest] * bool(rest)


def batches(samples: int, settings: TrainSettings, seed: int, joined: bool = False) -> Iterator[Tensor]:
    """Yield the indices (B,) of each step: epochs over seeded permutations, or `local_steps` batches, reshuffled at the end.

    The last, incomplete batch of a permutation is used. `joined` is as in `batch_sizes`.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = batch_sizes(samples, settings.batch_size, joined)
    left = settings.local_steps or settings.local_epochs * len(sizes)
    while left > 0:
        for index_B in torch.split(torch.randperm(samples, generator=generator), sizes)[:left]:
            left -= 1
            yield index_B


def batch_of(task: LocalTask, index_B: Tensor) -> Batch:
    """Return the samples and labels at these indices, on the task's processor, with the augmentation of the settings."""
    index_B = index_B.to(task.x.device)
    x, y = task.x[index_B].to(task.device), task.y[index_B].to(task.device)
    return Batch(augmented(x, task.settings.augment) if task.settings.augment and x.ndim == RANK else x, y)
