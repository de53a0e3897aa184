"""Changes of features before shards are written: normalisation, and noise that rises from client to client.

H height, W width, C channels, F features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from attune.common.errors import SettingError, nearest
from attune.common.seeds import derive
from attune.fedclient.data.arrays import Array
from attune.simulation.partition.samples import Dataset

How = Literal["none", "channel", "pixel", "cifar10", "cifar100"]
HOWS: tuple[str, ...] = get_args(How)
_CHUNK = 4096
_PUBLISHED = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


@dataclass(frozen=True)
class Normaliser:
    """Normalisation (x - mean) / std in float32; uint8 values are divided by 255 first.

    Attributes:
        mean: Has the shape of a sample, or of its last axis.
        std: Likewise.
    """

    mean: npt.NDArray[np.float64]
    std: npt.NDArray[np.float64]

    def apply(self, x: Array) -> npt.NDArray[np.float32]:
        made = np.empty(x.shape, dtype=np.float32)
        for start in range(0, len(x), _CHUNK):
            made[start : start + _CHUNK] = (_numbers(x[start : start + _CHUNK]) - self.mean) / self.std
        return made


def normaliser(data: Dataset, how: str) -> Normaliser | None:
    """Return the normalisation of a data set, or None for "none".

    A deviation of 0 counts as 1.

    Args:
        data: The data set.
        how: "channel" takes mean and deviation of each channel (last axis) over the training part. "pixel" takes them for
            each single feature over both parts (FedMCSA). "cifar10" and "cifar100" are the usual constants of these sets.

    Raises:
        SettingError: The data are tokens, `how` is unknown, or the constants do not fit the data.
    """
    if how not in HOWS:
        raise SettingError(f"unknown normalisation {how!r}{nearest(how, HOWS)}")
    if how == "none":
        return None
    if data.kind == "tokens":
        raise SettingError(f"{data.name} is text, which cannot be normalised or get noise; leave --normalise and --noise out")
    if how in _PUBLISHED:
        if data.kind != "images" or data.train_x.shape[-1] != 3:
            raise SettingError(f"--normalise {how} is for images with 3 channels; take channel for {data.name}")
        mean, std = _PUBLISHED[how]
        return Normaliser(np.array(mean), np.array(std))
    parts = [data.train_x] if how == "channel" else [data.train_x, data.test_x]
    axes = tuple(range(data.train_x.ndim - 1)) if how == "channel" else (0,)
    return _fit(parts, axes)


def _fit(parts: list[Array], axes: tuple[int, ...]) -> Normaliser:
    count = sum(part.size for part in parts) // np.sum(parts[0], axis=axes).size
    mean = np.asarray(sum(piece.sum(axis=axes) for piece in _chunks(parts)) / count)
    square = np.asarray(sum(((piece - mean) ** 2).sum(axis=axes) for piece in _chunks(parts)) / count)
    std = np.sqrt(square)
    std[std == 0] = 1.0
    return Normaliser(mean, std)


def _chunks(parts: list[Array]) -> Iterator[npt.NDArray[np.float64]]:
    for part in parts:
        for start in range(0, len(part), _CHUNK):
            yield _numbers(part[start : start + _CHUNK])


def _numbers(x: Array) -> npt.NDArray[np.float64]:
    return x.astype(np.float64) / 255 if x.dtype == np.uint8 else x.astype(np.float64)


def noise_levels(clients: int, largest: float) -> npt.NDArray[np.float64]:
    """Return the noise of each client, (N,): sigma_i = sigma_M * i / (N - 1) with sigma_M = `largest` (FedTP, figure 10)."""
    return largest * np.arange(clients) / max(clients - 1, 1)


def add_noise(x: Array, sigma: float, seed: int, client: int, part: str) -> npt.NDArray[np.float32]:
    """Return x + N(0, sigma) in float32. The draw depends only on the seed, the client and the part."""
    made = np.array(x, dtype=np.float32)
    rng = np.random.default_rng(derive(seed, "noise", client, part))
    for start in range(0, len(made), _CHUNK):
        piece = made[start : start + _CHUNK]
        piece += np.float32(sigma) * rng.standard_normal(piece.shape, dtype=np.float32)
    return made
