"""A linear model on fixed random features, whose weights follow from sums over samples: the model of `--method analytic`.

B samples, I numbers of a sample, D features with the constant one, C outputs.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from attune.common.errors import SettingError
from attune.common.models.options import ClosedFormOptions
from attune.common.plan import ModelSpec

WIDTH = 0.5  # of the frequencies, for inputs of variance 1
MOST_INPUTS, MOST_OUTPUTS = 1 << 14, 1_000
PIXELS = (0.5, 0.3)  # mean and deviation by which images enter, the same on all devices


class ClosedForm(nn.Module):
    """Scores W z(x), with z(x) = [sqrt(2 / R) cos(F x + p), 1], R random features.

    Source: Rahimi and Recht, "Random Features for Large-Scale Kernel Machines", NeurIPS 2007. F and p follow from
    `options.seed` alone, and never travel. The state is `head.weight`, W (C, D), float64, and `strength`: the ridge strength
    with which a device draws its own weights from W (0: it keeps W). With `options.one_sum` it also has the sums of which W is
    made (attune.common.methods.ridge), from which a device takes its own.

    Raises:
        SettingError: There are too many inputs or outputs.
    """

    frequency: Tensor
    phase: Tensor
    strength: Tensor

    def __init__(self, spec: ModelSpec, options: ClosedFormOptions) -> None:
        super().__init__()
        inputs = math.prod(spec.shape)
        if inputs > MOST_INPUTS or spec.classes > MOST_OUTPUTS:
            raise SettingError(
                f"model closed-form takes at most {MOST_INPUTS:,} numbers of a sample and {MOST_OUTPUTS:,} outputs, and here "
                f"are {inputs:,} and {spec.classes:,}: take another method, or smaller images"
            )
        draws = np.random.RandomState(options.seed)  # numpy promises that its numbers never change
        frequency_IR = draws.standard_normal((inputs, options.features)) * WIDTH / math.sqrt(inputs)
        phase_R = draws.uniform(0, 2 * math.pi, options.features)
        self.sharpness = options.sharpness or 1.0
        self.images = spec.kind == "images"
        for name, drawn in (("frequency", frequency_IR), ("phase", phase_R)):
            self.register_buffer(name, torch.tensor(drawn, dtype=torch.float32), persistent=False)
        self.head = nn.Linear(options.features + 1, spec.classes, bias=False, dtype=torch.float64)
        nn.init.zeros_(self.head.weight)
        size, sums = options.features + 1, dict[str, tuple[int, ...]]()
        if options.one_sum:
            sums = {"gram": (size * (size + 1) // 2,), "cross": (size, spec.classes), "gamma": (), "counted": ()}
        for name, shape in {"strength": (), **sums}.items():
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64))

    def features(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return z(x), (B, D), computed in `dtype`, for samples (B, ...)."""
        flat_BI = x.flatten(1).to(dtype)
        if self.images:
            flat_BI = (flat_BI - PIXELS[0]) / PIXELS[1]
        random_BR = torch.cos(flat_BI @ self.frequency.to(dtype) + self.phase.to(dtype)) * math.sqrt(2 / len(self.phase))
        return torch.cat([random_BR, torch.ones_like(flat_BI[:, :1])], dim=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.sharpness * (self.features(x) @ self.head.weight.float().T)
