"""U-Net for images with a label for every pixel (Ronneberger, Fischer, Brox, MICCAI 2015, arXiv 1505.04597).

B samples, C channels, H height, W width, F filters.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, max_pool2d

from attune.common.models.blocks import initialise
from attune.common.models.convnet import BatchNorm
from attune.common.models.options import UNetOptions
from attune.common.plan import ModelSpec


class UNet(nn.Module):
    """Network (B, C, H, W) -> scores (B, H, W, classes).

    On its way down each level halves height and width, odd sides rounded up, and doubles the filters; on its way up it is given
    what the same level saw on the way down. Convolutions are padded with zeros, so images of any size fit. `head` is a Linear
    over the filters of a pixel, which is a convolution of 1 x 1.
    """

    def __init__(self, spec: ModelSpec, options: UNetOptions) -> None:
        super().__init__()
        filters = [options.width << level for level in range(options.depth + 1)]
        self.depth = options.depth
        for level, (before, here) in enumerate(zip([spec.shape[-1], *filters], filters, strict=False)):
            self.add_module(f"down{level}", _convolutions(before, here, options))
        for level in reversed(range(options.depth)):
            self.add_module(f"up{level}", _convolutions(filters[level] + filters[level + 1], filters[level], options))
        self.head = nn.Linear(filters[0], spec.classes)
        initialise(self)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_uniform_(module.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        seen = [self.get_submodule("down0")(x)]
        for level in range(1, self.depth + 1):
            seen.append(self.get_submodule(f"down{level}")(max_pool2d(seen[-1], 2, ceil_mode=True)))
        x = seen.pop()
        for level in reversed(range(self.depth)):
            beside = seen.pop()
            x = torch.cat([interpolate(x, size=beside.shape[-2:], mode="nearest"), beside], dim=1)
            x = self.get_submodule(f"up{level}")(x)
        scores: Tensor = self.head(x.movedim(1, -1))
        return scores


def _convolutions(channels: int, filters: int, options: UNetOptions) -> nn.Sequential:
    """Return two convolutions of 3 x 3, each with a normalisation, in whose place no bias is needed, and ReLU."""
    layers: list[nn.Module] = []
    for before in (channels, filters):
        norm = BatchNorm(filters) if options.norm == "batch" else nn.GroupNorm(math.gcd(filters, 8), filters)
        layers += [nn.Conv2d(before, filters, 3, padding=1, bias=False), norm, nn.ReLU()]
    return nn.Sequential(*layers)
