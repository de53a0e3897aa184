"""Description of a device's data: moments of what enters the model's head, under the weights that every device starts from.

Only inputs are read, so a device without labels has one too. It says in about what proportions a device has which kinds of
inputs, and nothing of a single sample if there are many.

N samples, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from attune.common.models.structure import roles
from attune.common.protocol import MOST_MOMENTS


def description_size(model: nn.Module) -> int:
    """Return the number of numbers in a description by this model; 0: it has no Linear as its head, so there is none."""
    head = next((name.rpartition(".")[0] for name, of in roles(model).items() if "head" in of), "")
    layer = model.get_submodule(head) if head else None
    size = 2 * layer.in_features if isinstance(layer, nn.Linear) else 0
    return size if size <= MOST_MOMENTS else 0


def moments(batches: Iterable[Tensor], features: Callable[[Tensor], Tensor]) -> list[float]:
    """Return the mean and the standard deviation of each feature over all samples, 2 D numbers.

    Args:
        batches: Inputs of the model.
        features: What enters the head: inputs (N, ...) -> (N, ..., D).
    """
    count, total_D, squares_D = 0, torch.zeros(()), torch.zeros(())
    with torch.no_grad():
        for x in batches:
            rows = features(x).flatten(end_dim=-2).double()
            count, total_D = count + len(rows), total_D + rows.sum(dim=0)
            squares_D = squares_D + rows.square().sum(dim=0)
    mean_D = total_D / max(1, count)
    deviation_D = (squares_D / max(1, count) - mean_D.square()).clamp_min(0).sqrt()
    return [*mean_D.float().tolist(), *deviation_D.float().tolist()]
