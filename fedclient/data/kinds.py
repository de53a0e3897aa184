"""Kinds of data: images, tokens, series and tables. Their canonical axes, and checks of their values.

N samples, H height, W width, C channels, T steps, F features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import UNSET

from attune.common.errors import NonFiniteFeatures, ShapeMismatch, ShardError
from attune.common.plan import POSITIONED, Kind, ModelSpec, channel_weights
from attune.fedclient.data.arrays import MAX_BINARY_BYTES, Array

MAX_VOCABULARY = 1 << 20  # every token needs a row of an embedding; larger numbers are probably identifiers
_AXES: dict[Kind, str] = {"images": "(N, H, W) or (N, H, W, C)", "tokens": "(N, T)", "series": "(N, T, C)", "tabular": "(N, F)"}
RANKS: dict[Kind, int] = {"images": 4, "tokens": 2, "series": 3, "tabular": 2}  # number of axes, samples included
CHANNELS = (1, 3, 4)  # grey, colour, colour with transparency
_SHOWN = 8


WHOLE_NUMBERS = (
    "x holds whole numbers (N, F), which are taken as F features; if they are tokens of a text, say so: "
    '"kind": "tokens" in meta.json, or the setting data.kind=tokens of a simulation'
)


def infer(x: Array, where: str, tokens: bool = False) -> Kind:
    """Return the kind that follows from the type and the number of axes of `x`. Integers (N, T) are tokens if `tokens` says so.

    Raises:
        ShardError: No kind follows from them. The message calls the array `where`.
    """
    type_, axes = x.dtype, x.ndim
    if type_ == np.uint8 and axes in (3, 4):
        return "images"
    if type_.kind in "iu" and axes == 2:
        return "tokens" if tokens else "tabular"
    if type_.kind == "b" and axes == 2:
        return "tabular"
    if type_.kind == "f" and axes in (2, 3, 4):
        by_axes: tuple[Kind, ...] = ("tabular", "series", "images")
        return by_axes[axes - 2]
    raise ShardError(
        f"no kind of data follows from {where} of type {type_} and shape {x.shape}: uint8 (N, H, W[, C]) are images, "
        "floats (N, T, C) a series, numbers (N, F) tabular; convert it, or set `kind` in meta.json"
    )


def canonical(x: Array, kind: Kind, where: str) -> Array:
    """Return `x` with the axes of its kind: images (N, H, W, C), tokens (N, T), series (N, T, C), tabular (N, F).

    A missing last axis of images and series is added.

    Raises:
        ShardError: The axes or the type do not fit the kind, or an axis has size 0. The message calls the array `where`.
    """
    if kind in ("images", "series") and x.ndim == RANKS[kind] - 1:
        x = x[..., np.newaxis]
    if x.ndim != RANKS[kind]:
        raise ShardError(f"{where} has shape {x.shape}; {kind} need {_AXES[kind]}")
    if 0 in x.shape[1:]:
        raise ShardError(f"{where} has shape {x.shape}: its samples are empty")
    allowed = "iu" if kind == "tokens" else "biuf"
    if x.dtype.kind not in allowed:
        raise ShardError(f"{where} is of type {x.dtype}; {kind} need {'integers' if kind == 'tokens' else 'numbers'}")
    return x


def positions_of(x: Array, kind: Kind) -> tuple[int, ...]:
    """Return the axes of a sample whose positions can have labels: (T,) of tokens, (H, W) of images; empty: none can."""
    return x.shape[1:3] if kind in POSITIONED else ()


def channels_first(shape: tuple[int, ...]) -> bool:
    """Return whether images of this shape are surely (N, C, H, W): only the second axis has a size that channels have."""
    return len(shape) == RANKS["images"] and shape[1] in CHANNELS and shape[-1] not in CHANNELS


def channels_last(x: Array) -> Array:
    """Return images (N, C, H, W) as (N, H, W, C), and arrays with another number of axes as they are."""
    return x.transpose(0, 2, 3, 1) if x.ndim == RANKS["images"] else x


def resizing(size: Any, new: int, xp: Any = np) -> Any:
    """Return the weights, (new, size), by which an axis of pixels gets another size: bilinear, and antialiased.

    A new pixel is the mean of the pixels around its centre, by a triangle that reaches one pixel to both sides, of the old
    pixels or of the new ones, whichever are larger. So nothing between two pixels is skipped, as plain bilinear sampling does.
    `xp` is NumPy or torch.
    """
    centre_I = (xp.arange(new, dtype=xp.float64) + 0.5) * size / new
    reach = (2 * centre_I[:1]).clip(1.0)  # of the first new pixel, twice the centre is its width in old pixels
    weight_IS = (1 - abs(xp.arange(size, dtype=xp.float64) + 0.5 - centre_I[:, None]) / reach).clip(0.0)
    return weight_IS / weight_IS.sum(1)[:, None]


def described(kind: Kind, shape: tuple[int, ...]) -> str:
    """Return the kind and the shape of a sample in words."""
    axes = {"images": "height x width x channels", "tokens": "length", "series": "steps x channels", "tabular": "features"}
    return f"{kind} of {' x '.join(map(str, shape))} ({axes[kind]})"


def with_axes(x: Array, spec: ModelSpec, who: str, names: Sequence[str] = ()) -> Array:
    """Return samples with the axes of their kind, also those of images (N, C, H, W). `names` are those of their channels.

    Raises:
        ShapeMismatch: They have too few axes or too many.
    """
    if spec.kind == "images":
        is_first = x.shape[1:] == (spec.shape[-1], *spec.shape[:-1]) != spec.shape
        if spec.channels is not UNSET:  # of any size
            is_first = channels_first(x.shape) and x.shape[-1] != spec.shape[-1] and not names
        x = channels_last(x) if is_first else x
    try:
        return canonical(x, spec.kind, f"x of {who}")
    except ShardError as error:
        raise ShapeMismatch(f"{error}; the model takes {described(spec.kind, spec.shape)}") from None


def as_fractions(x: Array) -> Array:
    """Return images as the model takes them: 8 bits are divided by 255."""
    return x.astype(np.float32) / np.float32(255) if x.dtype == np.uint8 else x


def fit(x: Array, spec: ModelSpec, names: Sequence[str]) -> Array:
    """Return samples (N, ...) with the sizes and channels of a model; `x` itself if the plan does not let them be fitted.

    `names` are those of their channels, if they are known.

    Raises:
        ShardError: The plan's shape asks for too much memory.
    """
    if not (weights := channel_weights(spec, x.shape[1:], names)):
        return x
    if 4 * len(x) * math.prod(spec.shape) > MAX_BINARY_BYTES:
        raise ShardError(f"{len(x):,} {described(spec.kind, spec.shape)} are over 8 GiB: the operator can lower data.shape")
    numbers = as_fractions(x) if spec.kind == "images" else x
    return np.asarray(fit_floats(numbers.astype(np.result_type(numbers, np.float32)), spec, weights))


def fit_floats(x: Any, spec: ModelSpec, weights_CK: Sequence[Sequence[float]], xp: Any = np) -> Any:
    """Return floats (N, ..., K) with the sizes and the channels of a model, (N, ..., C).

    Images are resized, and a missing channel is 0. Of series the last steps count: longer ones lose their first steps, and
    shorter ones get NaN in front. NaN in front and of missing channels becomes 0, the mean, once the others are standardised.

    Args:
        x: The samples.
        spec: The model.
        weights_CK: What `channel_weights` gives.
        xp: NumPy or torch.
    """
    share_CK = xp.asarray(weights_CK, dtype=x.dtype)
    x = x @ share_CK.T
    if spec.kind == "images":
        x = xp.moveaxis(x, -1, 1)
        rows, columns = (xp.asarray(resizing(x.shape[at], spec.shape[at - 2], xp), dtype=x.dtype) for at in (2, 3))
        return xp.moveaxis(rows @ x @ columns.T, 1, -1)
    x = xp.where(share_CK.any(1), x, xp.nan)
    return xp.concatenate([xp.full_like(x[:, :1], xp.nan)] * spec.shape[0] + [x], 1)[:, -spec.shape[0] :]


def nearest(y: Array, size: Sequence[int]) -> Array:
    """Return values of pixels, (N, H, W, ...), at another size: of each new pixel those where its centre lies."""
    rows, columns = ((np.arange(new) + 0.5) * old / new for new, old in zip(size, y.shape[1:3], strict=True))
    return y[:, rows.astype(np.intp)][:, :, columns.astype(np.intp)]


def check_finite(x: Array, kind: Kind, where: str) -> None:
    """Check that all values are finite.

    Raises:
        NonFiniteFeatures: Values are NaN or infinite. The message counts them by column (tabular) or channel (other kinds).
    """
    if x.dtype.kind != "f" or np.isfinite(x).all():
        return
    bad = ~np.isfinite(x)
    columns = bad.reshape(-1, x.shape[-1]).sum(axis=0)
    hit = np.flatnonzero(columns)
    listed = ", ".join(f"{column} ({int(columns[column])})" for column in hit[:_SHOWN])
    more = f" and {len(hit) - _SHOWN} more" if len(hit) > _SHOWN else ""
    what = "column" if kind == "tabular" else "channel"
    samples = int(bad.reshape(len(x), -1).any(axis=1).sum())
    raise NonFiniteFeatures(
        f"{where} holds {int(bad.sum())} NaN or infinite values in {samples} of {len(x)} samples, by {what} (how many): "
        f"{listed}{more}; fill them in or leave those samples out"
    )


def check_unlike(x: Array, where: str) -> None:
    """Check that images (N, ...) are not all the same, as they are if the reading has lost what they show.

    Raises:
        ShardError: All images are equal, and there are several.
    """
    if len(x) > 1 and all(np.array_equal(image, x[0]) for image in x[1:]):
        raise ShardError(
            f"all {len(x)} images of {where} are equal as they were read: nothing can be learned from them. Look at their "
            "transparency, their bits and their scale"
        )


def vocabulary_of(path: Path, kind: Kind, declared: int | None, train_x: Array, test_x: Array) -> int:
    """Return the number of tokens: as declared, else the largest one + 1; 0 for other kinds.

    Raises:
        ShardError: There are too many, or one is outside what is declared; or other kinds declare a vocabulary.
    """
    if kind != "tokens":
        if declared is not None:
            raise ShardError(f"meta.json of {path} declares a vocabulary, but the data are {kind}; only tokens have one")
        return 0
    largest = max(int(part.max()) for part in (train_x, test_x) if part.size)
    vocabulary = declared if declared is not None else max(largest, 0) + 1
    if vocabulary > MAX_VOCABULARY:
        raise ShardError(
            f"the vocabulary of {path} would be {vocabulary}, more than {MAX_VOCABULARY}; number the tokens "
            "from 0 without gaps, or set `kind` in meta.json if these are no tokens"
        )
    for part, x in (("training", train_x), ("test", test_x)):
        check_tokens(x, vocabulary, f"x of the {part} part of {path}")
    return vocabulary


def check_tokens(x: Array, vocabulary: int, where: str) -> None:
    """Check that all tokens are from 0 to `vocabulary` - 1.

    Raises:
        ShardError: A token is outside this range.
    """
    if not x.size:
        return
    low, high = int(x.min()), int(x.max())
    if low < 0:
        raise ShardError(f"{where} holds {int((x < 0).sum())} negative tokens, the least is {low}; tokens count from 0")
    if high >= vocabulary:
        count = int((x >= vocabulary).sum())
        raise ShardError(f"{where} holds {count} tokens outside the vocabulary of {vocabulary}, the largest is {high}")
