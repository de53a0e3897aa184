"""Features and labels of a device's own training samples, for what is computed from them together.

N samples, B of a batch, T labels of a sample (1, or one at every position), D features.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from attune.fedclient.work.objectives.base import LocalTask
from attune.fedclient.work.objectives.descent import Cancelled

FEATURES, LABELS = "memory.features", "memory.labels"
BATCH = 512  # samples of one forward


def remember(
    task: LocalTask, model: Mapping[str, torch.Tensor], index_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return (features (N T, D) float32, labels (N T,)) of these training samples, on the task's processor.

    Features are what enters the head, without gradients, in evaluation mode. It is None without samples.

    Raises:
        Cancelled: The work was replaced.
    """
    features, labels = [], []
    task.network.model.eval()
    for index_B in torch.split(index_N, BATCH) if len(index_N) else ():
        if task.cancelled():
            raise Cancelled("this work was replaced")
        with torch.no_grad():
            _, features_BD = task.network.with_features(model, task.x[index_B.to(task.x.device)].to(task.device))
        features.append(features_BD.flatten(end_dim=-2).float())
        labels.append(task.y[index_B.to(task.y.device)].flatten().to(task.device))
    return (torch.cat(features), torch.cat(labels)) if features else None
