"""Features and labels of a device's own training samples, for predictors that remember them.

N samples, B of a batch, D features.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from common.objectives.base import LocalTask
from common.objectives.descent import Cancelled

FEATURES, LABELS = "memory.features", "memory.labels"
BATCH = 512  # samples of one forward


def drawn(task: LocalTask, size: int) -> torch.Tensor:
    """(size,) or fewer indices of training samples, in order: by the device's seed."""
    order = torch.randperm(len(task.x), generator=torch.Generator().manual_seed(task.seeds("memory")))
    return order[:size].sort().values


def remember(
    task: LocalTask, model: Mapping[str, torch.Tensor], index_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(what enters the head for these samples (N, D), labels (N,)); where every position has a label, each is a sample.

    None if there is no sample. Without gradients, in evaluation mode. Errors: Cancelled.
    """
    features, labels = [], []
    task.network.model.eval()
    for index_B in torch.split(index_N, BATCH) if len(index_N) else ():
        if task.cancelled():
            raise Cancelled("this work was replaced")
        with torch.no_grad():
            _, features_BD = task.network.with_features(model, task.x[index_B.to(task.x.device)].to(task.device))
        features.append(features_BD.flatten(end_dim=-2))
        labels.append(task.y[index_B.to(task.y.device)].flatten().to(task.device))
    return (torch.cat(features), torch.cat(labels)) if features else None
