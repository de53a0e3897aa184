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


def batches(samples: int, settings: TrainSettings, seed: int) -> Iterator[Tensor]:
    """Yield the indices (B,) of each step: epochs over seeded permutations, or `local_steps` batches, reshuffled at the end.

    The last, incomplete batch of a permutation is used.
    """
    generator = torch.Generator().manual_seed(seed)
    left = settings.local_steps or settings.local_epochs * -(-samples // settings.batch_size)
    while left > 0:
        for index_B in torch.split(torch.randperm(samples, generator=generator), settings.batch_size)[:left]:
            left -= 1
            yield index_B


def batch_of(task: LocalTask, index_B: Tensor) -> Batch:
    """Return the samples and labels at these indices, on the task's processor, with the augmentation of the settings."""
    index_B = index_B.to(task.x.device)
    x, y = task.x[index_B].to(task.device), task.y[index_B].to(task.device)
    return Batch(augmented(x, task.settings.augment) if task.settings.augment and x.ndim == RANK else x, y)
