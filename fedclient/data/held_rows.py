"""Choice of a table's rows for testing, such that a row stays held out when other rows come or go.

N samples, F features.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from attune.fedclient.data.arrays import Array

_SIZE = 8  # bytes of a hash
_QUARTER = 1 << (8 * _SIZE - 2)


@dataclass(frozen=True)
class Hashed:
    """Hashes of a table's rows, (N,), and those that were held out before."""

    rows: list[str]
    held_before: Collection[str]


def row_hashes(x: Array, y: Array, seed: int, groups: Array | None = None, keys: Array | None = None) -> list[str]:
    """Return a keyed hash of each row, (N,): of its group, else of its key, else of its content.

    Args:
        x: Features, (N, F) float32; missing values are NaN.
        y: Labels or targets, (N,) or (N, K).
        seed: Key of the hash.
        groups: Group of each sample, (N,).
        keys: Keys that tell rows apart, (N,).
    """
    names = groups if groups is not None else keys
    if names is not None:
        contents = [str(name).encode() for name in names.tolist()]
    else:
        plain = np.where(np.isnan(x), np.float32(np.nan), x + np.float32(0))  # one NaN, and no -0
        contents = [row.tobytes() + repr(label).encode() for row, label in zip(plain, y.tolist(), strict=True)]
    key = f"held out {seed}".encode()
    return [blake2b(content, digest_size=_SIZE, key=key).hexdigest() for content in contents]


def held_out(hashes: list[str], stored: Collection[str]) -> npt.NDArray[np.bool_]:
    """Return which rows are for testing, (N,): those whose hash lies below a quarter of all, and those that were before.

    If that is no row, the rows with the lowest hash are held out; if that is every row, those with the highest are trained on.
    Neither happens if all rows have one hash.
    """
    places = np.array([int(value, 16) for value in hashes], dtype=np.uint64)
    held = (places < _QUARTER) | np.isin(hashes, list(stored))
    if len(set(hashes)) < 2:
        return np.zeros(len(hashes), dtype=bool)
    if not held.any():
        lowest = places == places.min()
        return lowest if 2 * lowest.sum() <= len(hashes) else held
    return places != places.max() if held.all() else held
