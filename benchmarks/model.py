"""A model without computation: its forward pass touches one tiny tensor, while all its parameters travel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attune.common.errors import SettingError
from attune.common.plan import ModelSpec

FACTORY = "benchmarks.model:make"


class Freight(nn.Module):
    """Model in which `sizes[0]` values are the logits, one for each class, and the other tensors only travel.

    Raises:
        SettingError: There are fewer parameters than tensors and classes need.
    """

    def __init__(self, parameters: int, tensors: int, classes: int) -> None:
        super().__init__()
        rest, others = parameters - classes, tensors - 1
        if rest < others or others < 1:
            raise SettingError(f"{parameters} parameters cannot be {tensors} tensors of which the first has {classes} values")
        sizes = [rest // others + (index < rest % others) for index in range(others)]
        self.logits = nn.Parameter(torch.zeros(classes))
        self.freight = nn.ParameterList([torch.randn(size) for size in sizes])

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, C) for x (B, F), the same for every sample."""
        return self.logits.expand(len(x), -1)


def make(spec: ModelSpec) -> nn.Module:
    """Make the model from the options `parameters` and `tensors`, both counts."""
    return Freight(int(spec.options["parameters"]), int(spec.options["tensors"]), spec.classes)
