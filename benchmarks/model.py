"""A model with nothing to compute: its forward touches one tiny tensor, while all of its parameters travel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attune.common.errors import SettingError
from attune.common.plan import ModelSpec

FACTORY = "benchmarks.model:make"


class Freight(nn.Module):
    """`sizes[0]` values are the logits (one a class); the other tensors only travel.

    Errors: SettingError unless there are as many parameters as tensors and classes ask for.
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
        """x (B, F) -> logits (B, C), the same for every sample."""
        return self.logits.expand(len(x), -1)


def make(spec: ModelSpec) -> nn.Module:
    """The factory: options `parameters` and `tensors`, both counts."""
    return Freight(int(spec.options["parameters"]), int(spec.options["tensors"]), spec.classes)
