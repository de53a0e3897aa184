"""Which training samples a device holds out to choose between models.

N samples.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from attune.fedclient.data.arrays import Array

FEWEST = 20  # with fewer training samples a choice would be noise, and each sample is needed

Indices = npt.NDArray[np.intp]


def hold_out(labels: Array, share: float, seed: int) -> tuple[Indices, Indices]:
    """(indices to train on, indices held out), each ascending; of every class about the same `share`.

    labels: (N,), or (N, ...) of which the last position counts. Nothing is held out of fewer than FEWEST samples.
    """
    count = round(share * len(labels)) if len(labels) >= FEWEST else 0
    shuffled = np.random.default_rng(seed).permutation(len(labels))
    by_class = shuffled[np.argsort(labels.reshape(len(labels), -1)[shuffled, -1], kind="stable")] if len(labels) else shuffled
    # Evenly spread, so that every class gives its part.
    places = (np.arange(count) * 2 + 1) * len(labels) // (2 * max(1, count))
    held = np.zeros(len(labels), dtype=bool)
    held[by_class[places]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)
