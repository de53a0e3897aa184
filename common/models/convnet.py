"""ConvNet of two convolutions for images, plain (FedTP's baselines) or with batch normalisation (FedBN's model).

B samples, C channels, H height, W width.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from attune.common.models.blocks import initialise
from attune.common.models.options import ConvNetOptions
from attune.common.plan import ModelSpec

_KERNEL = 5  # pixels a side
_SMALL = 16  # pixels: along a shorter side, two unpadded convolutions and poolings leave nothing


class BatchNorm(_BatchNorm):
    """Batch normalisation of (B, C, H, W) or (B, C); a training batch of one sample is normalised as in prediction.

    A shard's last batch may be one sample, which has no variance: torch refuses it after a fully connected layer, and after
    a convolution would normalise the image by itself. Here it takes the running statistics and leaves them as they are.
    """

    def _check_input_dim(self, x: Tensor) -> None:
        """Every rank is normalised over all dimensions but the second."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(x) == 1:
            return batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps)
        return super().forward(x)


def make_convnet(spec: ModelSpec, options: ConvNetOptions) -> nn.Sequential:
    """(B, C, H, W) -> logits (B, classes): conv, ReLU, pool, twice; then fully connected layers with ReLU, and `head`.

    Along a side of 16 pixels or more the convolutions take no padding, as in the paper; along a shorter one they keep the
    size (2 zeros at either end), so that an image of any size can be taken. Poolings are 2 x 2 and keep the end of an odd side.
    """
    return _make(spec, options, normalised=False)


def make_convnet_bn(spec: ModelSpec, options: ConvNetOptions) -> nn.Sequential:
    """`make_convnet` with a batch normalisation after every convolution and fully connected layer but the last (FedBN).

    Those layers have no bias of their own: the normalisation would take it out again.
    """
    return _make(spec, options, normalised=True)


def _make(spec: ModelSpec, options: ConvNetOptions, normalised: bool) -> nn.Sequential:
    height, width, channels = spec.shape
    padding = _padding(height), _padding(width)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for position, filters in enumerate(options.channels):
        layers[f"conv{position}"] = nn.Conv2d(channels, filters, _KERNEL, padding=padding, bias=not normalised)
        if normalised:
            layers[f"norm{position}"] = BatchNorm(filters)
        layers[f"relu{position}"] = nn.ReLU()
        layers[f"pool{position}"] = nn.MaxPool2d(2, ceil_mode=True)
        height, width, channels = _halved(height, padding[0]), _halved(width, padding[1]), filters
    layers["flatten"] = nn.Flatten()
    features = height * width * channels
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


def _halved(side: int, padding: int) -> int:
    """What a convolution and a pooling leave of a side."""
    return -(-(side + 2 * padding - _KERNEL + 1) // 2)


def _initialise(model: nn.Sequential) -> None:
    """He weights where a ReLU follows, a Glorot head: 5 epochs of SGD on 640 digits give over 80 %, with torch's own 51 %."""
    initialise(model)
    for name, layer in model.named_children():
        if isinstance(layer, nn.Conv2d | nn.Linear) and name != "head":
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
