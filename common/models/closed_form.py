"""Linear models on fixed features, whose weights follow from sums over samples: the models of `--method analytic`.

B samples, I numbers of a sample, D features with the constant one, C outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from typing_extensions import Self

from attune.common.errors import SettingError
from attune.common.models.options import ClosedFormOptions, check_closed_form
from attune.common.plan import ModelSpec

PIXELS = (0.5, 0.3)  # mean and deviation by which images enter, the same on all devices


class ClosedForm(nn.Module):
    """Scores W z(x) of fixed features z(x), (D,), in blocks that end with 1. One block predicts, and the fleet chooses which.

    The state is `head.weight`, W (C, D), float64; `strength`: the ridge strength with which a device draws its own weights from
    W (0: it keeps W); `block`, the place of the block that predicts; and `sizes`, the number of features of each block.

    Args:
        spec: The model.
        features: Of each block their number, without the constant.

    Raises:
        SettingError: There are too many features or outputs, or a label for each position.
    """

    strength: Tensor
    block: Tensor
    block_of: Tensor

    def __init__(self, spec: ModelSpec, features: Sequence[int]) -> None:
        super().__init__()
        check_closed_form(spec, features)
        self.sharpness = float(spec.options.get("sharpness") or 1.0)
        sizes = [1 + number for number in features]
        self.head = nn.Linear(sum(sizes), spec.classes, bias=False, dtype=torch.float64)
        nn.init.zeros_(self.head.weight)
        for name in ("strength", "block"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))
        self.register_buffer("sizes", torch.tensor(sizes, dtype=torch.float64))
        blocks = [block for block, size in enumerate(sizes) for _ in range(size)]
        self.register_buffer("block_of", torch.tensor(blocks), persistent=False)

    def features(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return z(x), (B, D), computed in `dtype`, for samples (B, ...)."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        is_used_D = self.block_of == self.block
        scores: Tensor = self.head(
            self.features(x).double() * is_used_D
        )  # a call of the head, at which ordinary models read features
        return self.sharpness * scores.float()


class RandomFeatures(ClosedForm):
    """Closed form with random features, sqrt(2 / R) cos(F x + p), in a block for each width of F.

    With `options.linear` there is a last block of the numbers themselves, x / sqrt(I).

    Source: Rahimi and Recht, "Random Features for Large-Scale Kernel Machines", NeurIPS 2007. F and p follow from
    `options.seed` alone, and never travel. With `options.one_sum` the state also has the sums of which W is made
    (attune.common.methods.ridge), from which a device takes its own.

    Raises:
        SettingError: There are too many inputs or outputs.
    """

    frequency: Tensor
    phase: Tensor

    def __init__(self, spec: ModelSpec, options: ClosedFormOptions) -> None:
        inputs, self.images, self.options = math.prod(spec.shape), spec.kind == "images", options
        kinds = options.blocks(inputs)
        super().__init__(spec, kinds)
        for name, numbers in zip(("frequency", "phase"), options.drawn(inputs), strict=True):
            self.register_buffer(name, torch.from_numpy(numbers), persistent=False)
        sums: dict[str, tuple[int, ...]] = {}
        if options.one_sum:
            triangles = sum((number + 1) * (number + 2) // 2 for number in kinds)
            cross = (self.head.in_features, spec.classes)
            sums = {"gram": (triangles,), "cross": cross, "gamma": (len(kinds),), "counted": ()}
        for name, shape in sums.items():
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64))

    def features(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        flat_BI = x.flatten(1).to(dtype)
        if self.images:
            flat_BI = (flat_BI - PIXELS[0]) / PIXELS[1]
        return cast(Tensor, self.options.values(flat_BI, self.frequency.to(dtype), self.phase.to(dtype), torch))


class ClosedFormOnBody(ClosedForm):
    """Closed form with z(x) = [f(x) / |f(x)|, 1], f(x) the outputs of a frozen body: for factories of one's own.

    Outputs have a length of 1, like random features, so that the same ridge strengths fit any body. docs/adapters.md says how
    devices come to the same body.

    Args:
        spec: The model, as the factory got it.
        body: Module from samples (B, ...) to (B, `features`). It never trains: dropout is off, and statistics stay.
        features: Number of its outputs.

    Raises:
        SettingError: As ClosedForm; at a call, if the body has other outputs.
    """

    def __init__(self, spec: ModelSpec, body: nn.Module, features: int) -> None:
        super().__init__(spec, [features])
        self.body = body.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> Self:
        return super().train(False)

    def features(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        outputs_BF, announced = self.body(x), self.head.in_features - 1
        if outputs_BF.shape[1:] != (announced,):
            raise SettingError(
                f"the body of the closed form gives {tuple(outputs_BF.shape)} numbers, and {announced} for each sample were "
                "announced: correct the model's factory"
            )
        outputs_BF = nn.functional.normalize(outputs_BF.to(dtype), dim=1)
        return torch.cat([outputs_BF, torch.ones_like(outputs_BF[:, :1])], dim=1)
