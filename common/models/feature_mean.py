"""Mean of the features of all devices, which a method may keep beside the model's tensors (`ModelSpec.feature_mean`).

Features are what enters the model's head. The mean is two buffers of the model, so that it travels, is aggregated, saved and
restored as any tensor of a shared part.

D features.
"""

from __future__ import annotations

import torch
from torch import nn

from attune.common.errors import SettingError
from attune.common.models.structure import roles

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
    head = next((tensor.rpartition(".")[0] for tensor, of in roles(model).items() if "head" in of), "")
    layer = model.get_submodule(head) if head else None
    if not isinstance(layer, nn.Linear) or layer.bias is None:
        raise SettingError(
            f"the method shifts what enters the head, so it needs a model whose head is a Linear with a bias, and {name} has "
            "none: take another model, or another method"
        )
    weight = layer.weight
    model.register_buffer(MEAN, torch.zeros(weight.shape[1], dtype=weight.dtype, device=weight.device))
    model.register_buffer(KNOWN, torch.zeros(1, dtype=weight.dtype, device=weight.device))
