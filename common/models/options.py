"""Options of each built-in model, with defaults and checks. This module does not import torch.

A width, a head count or another size of 0 means the default that follows from the other options.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from typing_extensions import Self

from attune.common.config import Count, CountOrZero, Share
from attune.common.errors import SettingError
from attune.common.plan import ModelSpec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# A layer of width 1 has few bytes, but building it takes time and memory: a peer may name a million of them.
MOST_LAYERS = 1000
Layers = Annotated[int, msgspec.Meta(ge=1, le=MOST_LAYERS)]
LayersOrZero = Annotated[int, msgspec.Meta(ge=0, le=MOST_LAYERS)]
Width = Annotated[float, msgspec.Meta(gt=0, le=100)]
Widths = Annotated[tuple[Width, ...], msgspec.Meta(min_length=1, max_length=8)]
HiddenWidths = Annotated[list[Count], msgspec.Meta(min_length=1, max_length=MOST_LAYERS)]


class ModelOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the options of every model that has a name."""

    def resolved(self, shape: tuple[int, ...]) -> Self:
        """Return the options with every default filled in, for samples of `shape`.

        Raises:
            SettingError: The options do not fit each other, or the shape.
        """
        return self


class VitOptions(ModelOptions, frozen=True, forbid_unknown_fields=True):
    """Options of the Vision Transformer. `preset = "paper"` is FedTP's for 32 x 32 images; single options override it."""

    # small: width 32, depth 2, 4 heads. paper: FedTP's for 32 x 32 images: width 128, depth 8, 8 heads of 64, patch 4,
    # dropout 0.1.
    preset: Literal["small", "paper"] = "small"
    # Pixels per side. 0: the smallest size that gives at most 16 patches (paper: 4). Images that it does not divide are
    # padded.
    patch: CountOrZero = 0
    # Width of a token. 0: 32 (paper: 128).
    width: CountOrZero = 0
    # Blocks. 0: 2 (paper: 8).
    depth: LayersOrZero = 0
    # Attention heads. 0: 4 (paper: 8).
    heads: CountOrZero = 0
    # Size of a head. 0: width / heads, which must divide (paper: 64).
    head_dim: CountOrZero = 0
    # Hidden width of a block's MLP. 0: twice the width.
    mlp: CountOrZero = 0
    # Dropout. none: 0 (paper: 0.1).
    dropout: Share | None = None

    def resolved(self, shape: tuple[int, ...]) -> Self:
        """Return the options with every default filled in, for images of `shape` (H, W, C).

        Raises:
            SettingError: The width is no multiple of the number of heads.
        """
        paper = self.preset == "paper"
        width = self.width or (128 if paper else 32)
        heads = self.heads or (8 if paper else 4)
        return msgspec.structs.replace(
            self,
            patch=self.patch or (4 if paper else _patch(shape[0], shape[1])),
            width=width,
            depth=self.depth or (8 if paper else 2),
            heads=heads,
            head_dim=self.head_dim or (64 if paper else _head_dim(width, heads)),
            mlp=self.mlp or 2 * width,
            dropout=self.dropout if self.dropout is not None else (0.1 if paper else 0.0),
        )


class TransformerOptions(ModelOptions, frozen=True, forbid_unknown_fields=True):
    """Options of the Transformer encoder for token sequences (causal), and time series and tables (not causal).

    `leaky_targets` drops the causal mask although the labels are the next tokens of the input (erratum E3).
    """

    # Width of a token; a multiple of `heads`, unless `head_dim` is set.
    width: Count = 32
    # Blocks.
    depth: Layers = 2
    # Attention heads.
    heads: Count = 4
    # Size of a head. 0: width / heads.
    head_dim: CountOrZero = 0
    # Hidden width of a block's MLP. 0: twice the width.
    mlp: CountOrZero = 0
    # Dropout. 0: none.
    dropout: Share = 0.0
    # No causal mask, although each label is the next token. It reproduces a published error (docs/methods/fedtp.md#errata);
    # its accuracies do not measure prediction.
    leaky_targets: bool = False

    def resolved(self, shape: tuple[int, ...]) -> Self:
        """Return the options with every default filled in.

        Raises:
            SettingError: The width is no multiple of the number of heads.
        """
        head_dim = self.head_dim or _head_dim(self.width, self.heads)
        return msgspec.structs.replace(self, head_dim=head_dim, mlp=self.mlp or 2 * self.width)


class ConvNetOptions(ModelOptions, frozen=True, forbid_unknown_fields=True):
    """Options of the convolutional network: two convolutions over 5 (x 5) with poolings, then fully connected layers."""

    # Filters of the two convolutions.
    channels: Annotated[list[Count], msgspec.Meta(min_length=2, max_length=2)] = msgspec.field(default_factory=lambda: [16, 32])
    # Widths of the hidden layers behind them.
    hidden: HiddenWidths = msgspec.field(default_factory=lambda: [120, 84])


class UNetOptions(ModelOptions, frozen=True, forbid_unknown_fields=True):
    """Options of the U-Net, which scores every pixel of an image."""

    # Filters of the first level. Each level below has twice as many.
    width: Count = 8
    # Levels below the first, each of half the height and width.
    depth: Annotated[int, msgspec.Meta(ge=1, le=8)] = 3
    # Normalisation after each convolution: by groups of an image's own filters, as small batches and privacy.unit need, or by
    # the batch.
    norm: Literal["group", "batch"] = "group"


class LstmOptions(ModelOptions, frozen=True, forbid_unknown_fields=True):
    """Options of the stacked LSTM."""

    # Size of a token's embedding; a time series is used as it is.
    embedding: Count = 8
    # Width of each layer.
    width: Count = 256
    # Layers.
    depth: Layers = 2


class DnnOptions(ModelOptions, frozen=True, forbid_unknown_fields=True):
    """Options of the fully connected network with ReLU."""

    # Widths of the hidden layers.
    hidden: HiddenWidths = msgspec.field(default_factory=lambda: [100])


class MlrOptions(ModelOptions, frozen=True, forbid_unknown_fields=True):
    """Options of multinomial logistic regression: one linear layer without options."""


MOST_INPUTS, MOST_FEATURES, MOST_OUTPUTS = 1 << 14, 4_000, 1_000  # of a closed form; features of all blocks
SHARPNESS = 8.0  # of a closed form for classes and labels: its scores then are about as sure as they are right


class ClosedFormOptions(ModelOptions, frozen=True, forbid_unknown_fields=True):
    """Options of the linear model on random features, which `--method analytic` solves."""

    # Random features of a sample, of each width. What a device hands in grows with their square: 1 MB at 500, 64 MB at 4,000.
    features: Annotated[int, msgspec.Meta(ge=1, le=4000)] = 500
    # Widths of the random features, for inputs of variance 1: narrow ones are smoother. Of several, the fleet chooses, but the
    # first predicts unless another is clearly better.
    widths: Widths = (0.5,)
    # There is a regression on the numbers of a sample themselves, too, between which and the others the fleet chooses.
    linear: bool = False
    # Factor of the scores. none: 8 for classes, whose scores then are about as sure as they are right, and 1 for numbers.
    sharpness: Annotated[float, msgspec.Meta(gt=0, le=1000)] | None = None
    # Seed from which they are drawn, the same on all devices.
    seed: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] = 0
    # Devices are served one sum of all, which it has room for. The server sets it.
    one_sum: bool = False

    def blocks(self, inputs: int) -> list[int]:
        """Return the number of features of each block, without the constant, for samples of so many numbers."""
        return [*[self.features] * len(self.widths), *([inputs] if self.linear else [])]

    def drawn(self, inputs: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Return the frequencies F (I, R) and phases p (R,) of all widths, one after the other.

        Raises:
            SettingError: There are too many inputs.
        """
        if inputs > MOST_INPUTS:
            raise SettingError(
                f"model closed-form takes at most {MOST_INPUTS:,} numbers of a sample, and here are {inputs:,}: take another "
                "method, or smaller images"
            )
        import numpy as np  # here, because commands that only read settings do without it

        draws = np.random.RandomState(self.seed)  # numpy promises that its numbers never change
        R, most, pieces = self.features, 2 * math.pi, []
        for width in self.widths:
            pieces.append((draws.standard_normal((inputs, R)) * width / math.sqrt(inputs), draws.uniform(0, most, R)))
        frequency_IR, phase_R = (np.concatenate(of, axis=-1).astype(np.float32) for of in zip(*pieces, strict=True))
        return frequency_IR, phase_R

    def values(self, flat_BI: Any, frequency_IR: Any, phase_R: Any, library: Any) -> Any:
        """Return z(x), (B, D), in the type of flat samples, F and p: sqrt(2 / R) cos(F x + p), blocks that end with 1.

        `library` is torch or numpy.
        """
        R = self.features
        cosine_BR = library.cos(flat_BI @ frequency_IR + phase_R) * math.sqrt(2 / R)
        blocks = [cosine_BR[:, place : place + R] for place in range(0, len(phase_R), R)]
        blocks += [flat_BI / math.sqrt(flat_BI.shape[1])] if self.linear else []
        one_B1 = library.ones_like(flat_BI[:, :1])
        return library.concat([part for block_BR in blocks for part in (block_BR, one_B1)], 1)


def check_closed_form(spec: ModelSpec, features: Sequence[int]) -> None:
    """Check the size of a closed form with so many features in each block.

    Raises:
        SettingError: There are too many features or outputs, or a label for each position.
    """
    if sum(features) > MOST_FEATURES or spec.classes > MOST_OUTPUTS:
        raise SettingError(
            f"a closed form takes at most {MOST_FEATURES:,} features and {MOST_OUTPUTS:,} outputs, and here are "
            f"{sum(features):,} and {spec.classes:,}: take fewer of them (model.features, model.widths), or another method"
        )
    if spec.per_position:
        raise SettingError("a closed form gives one answer for a sample, and here every token has a label")


class HuggingFaceOptions(ModelOptions, frozen=True, forbid_unknown_fields=True):
    """Options of a model of Hugging Face transformers, made from a config."""

    # The config's `model_type`: `vit`, `convnext`, `bert`, `gpt2`, ...
    type: str
    # Overrides of that type's defaults: `hidden_size = 64`, `num_hidden_layers = 2`, ...
    config: dict[str, Any] = {}


LEAKY = (
    "model.leaky_targets is on: every position of the model sees the next token, which is its label. Accuracies measure this "
    "leak, not prediction. The option exists to reproduce a published figure (erratum E3 in docs/methods/fedtp.md)"
)


def cautions(name: str | None, options: Mapping[str, Any]) -> list[str]:
    """Return the warnings that server and devices print before they use a model with these options.

    Args:
        name: Name of the model; None means the usual model for the data.
        options: The model's options.
    """
    is_user_model = name is not None and ":" in name
    return [LEAKY] if options.get("leaky_targets") and not is_user_model else []


def _patch(height: int, width: int) -> int:
    patch = 1
    while -(-height // patch) * -(-width // patch) > 16:
        patch += 1
    return patch


def _head_dim(width: int, heads: int) -> int:
    if width % heads:
        raise SettingError(
            f"setting model.width: {width} is not a multiple of model.heads = {heads}; change one, or set model.head_dim"
        )
    return width // heads
