"""Convolutional networks: two convolutions for images, plain (FedTP's baselines) or with batch normalisation (FedBN); a U-Net.

A time series has convolutions along its steps. The U-Net is for images with a label for every pixel (Ronneberger, Fischer,
Brox, MICCAI 2015, arXiv 1505.04597). B samples, C channels, H height, W width, T steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from math import gcd, prod

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, interpolate, max_pool2d
from torch.nn.modules.batchnorm import _BatchNorm

from attune.common.models.blocks import initialise
from attune.common.models.options import ConvNetOptions, UNetOptions
from attune.common.plan import ModelSpec

_KERNEL = 5  # pixels a side
_SMALL = 16  # pixels: along a shorter side, two unpadded convolutions and poolings leave nothing


class ChannelsFirst(nn.Module):
    """Layer that turns a series as devices prepare it (B, T, C) into (B, C, T), the form in which it is convolved."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class BatchNorm(_BatchNorm):
    """Batch normalisation of (B, C, H, W), (B, C, T) or (B, C) that accepts a training batch of one sample.

    A shard's last batch may be one sample, which has no variance. torch refuses it after a fully connected layer, and after a
    convolution it would normalise the image by itself. Here such a batch is normalised with the running statistics, which
    stay as they are.
    """

    def _check_input_dim(self, x: Tensor) -> None:
        """Accept every rank: all dimensions but the second are normalised."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(x) == 1:
            return batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps)
        return super().forward(x)


def make_convnet(spec: ModelSpec, options: ConvNetOptions) -> nn.Sequential:
    """Return a network (B, C, H, W), or a series (B, T, C) -> logits (B, classes).

    It has two convolutions, each with ReLU and pooling, then fully connected layers with ReLU, and `head`. Along a side of 16
    pixels or steps or more the convolutions have no padding, as in the paper. Along a shorter side they pad 2 zeros at each
    end, so that samples of any size fit. Poolings are over 2 along each side and keep the last pixel of an odd side.
    """
    return _make(spec, options, normalised=False)


def make_convnet_bn(spec: ModelSpec, options: ConvNetOptions) -> nn.Sequential:
    """Return `make_convnet` with batch normalisation after every convolution and fully connected layer but the last (FedBN).

    Layers before a normalisation have no bias, because the normalisation would remove it.
    """
    return _make(spec, options, normalised=True)


def _make(spec: ModelSpec, options: ConvNetOptions, normalised: bool) -> nn.Sequential:
    *sides, channels = spec.shape
    padding = tuple(map(_padding, sides))
    convolution: Callable[..., nn.Module] = nn.Conv2d if len(sides) > 1 else nn.Conv1d
    pooling: Callable[..., nn.Module] = nn.MaxPool2d if len(sides) > 1 else nn.MaxPool1d
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    if len(sides) == 1:
        layers["channels"] = ChannelsFirst()
    for position, filters in enumerate(options.channels):
        layers[f"conv{position}"] = convolution(channels, filters, _KERNEL, padding=padding, bias=not normalised)
        if normalised:
            layers[f"norm{position}"] = BatchNorm(filters)
        layers[f"relu{position}"] = nn.ReLU()
        layers[f"pool{position}"] = pooling(2, ceil_mode=True)
        sides, channels = [-(-(side + 2 * pad - _KERNEL + 1) // 2) for side, pad in zip(sides, padding, strict=True)], filters
    layers["flatten"] = nn.Flatten()
    features = prod(sides) * channels
    for position, hidden in enumerate(options.hidden, start=len(options.channels)):
        layers[f"hidden{position}"] = nn.Linear(features, hidden, bias=not normalised)
        if normalised:
            layers[f"norm{position}"] = BatchNorm(hidden)
        layers[f"relu{position}"] = nn.ReLU()
        features = hidden
    layers["head"] = nn.Linear(features, spec.classes)
    model = nn.Sequential(layers)
    _initialise(model)
    return model


def _padding(side: int) -> int:
    return _KERNEL // 2 if side < _SMALL else 0


def _initialise(model: nn.Sequential) -> None:
    """Set He weights where a ReLU follows, and a Glorot head.

    5 epochs of SGD on 640 digits reach more than 80 % with them, and 51 % with torch's own initial values.
    """
    initialise(model)
    for name, layer in model.named_children():
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Linear) and name != "head":
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


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
        norm = BatchNorm(filters) if options.norm == "batch" else nn.GroupNorm(gcd(filters, 8), filters)
        layers += [nn.Conv2d(before, filters, 3, padding=1, bias=False), norm, nn.ReLU()]
    return nn.Sequential(*layers)
