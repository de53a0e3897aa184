"""Features, which enter the model's head: their mean over all devices, and the description of a device's data by them.

A method may keep the mean beside the model's tensors (`ModelSpec.feature_mean`). It is two buffers of the model, so that it
travels, is aggregated, saved and restored as any tensor of a shared part.

A description has moments of the features under the weights that every device starts from. Only inputs are read, so a device
without labels has one too. It says in about what proportions a device has which kinds of inputs, and nothing of a single sample
if there are many.

N samples, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from attune.common.errors import SettingError
from attune.common.models.structure import head_of, roles
from attune.common.protocol import MOST_MOMENTS

MEAN = "attune_feature_mean"  # (D,)
KNOWN = "attune_feature_mean_known"  # (1,): 0 until the devices have measured it, then 1


def add_feature_mean(model: nn.Module, name: str) -> None:
    """Add the two buffers, with zeros.

    Args:
        model: The model.
        name: Name of the model, for errors.

    Raises:
        SettingError: The model has no head that is a Linear with a bias.
    """
    layer = _head(model)
    if layer is None or layer.bias is None:
        raise SettingError(
            f"the method shifts what enters the head, so it needs a model whose head is a Linear with a bias, and {name} has "
            "none: take another model, or another method"
        )
    weight = layer.weight
    model.register_buffer(MEAN, torch.zeros(weight.shape[1], dtype=weight.dtype, device=weight.device))
    model.register_buffer(KNOWN, torch.zeros(1, dtype=weight.dtype, device=weight.device))


def _head(model: nn.Module) -> nn.Linear | None:
    """Return the head, if it is a Linear."""
    layer = model.get_submodule(head_of(roles(model)))
    return layer if isinstance(layer, nn.Linear) else None


def description_size(model: nn.Module) -> int:
    """Return the number of numbers in a description by this model; 0: it has no Linear as its head, so there is none."""
    layer = _head(model)
    size = 0 if layer is None else 2 * layer.in_features
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
