"""Changes that recipes make to a partition: fewer samples, other labels or features per client, a minute of labels.

N clients, n samples of a client. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from attune.common.seeds import derive
from attune.fedclient.data.arrays import Array
from attune.simulation.partition.samples import Dataset, Positions
from attune.simulation.partition.split import Partition

Change = Callable[[int, Array, Array], tuple[Array, Array]]  # a client's place, its x and y


@dataclass(frozen=True)
class Changed(Partition):
    """Partition in which each client's samples are changed by a function."""

    change: Change = lambda client, x, y: (x, y)

    def arrays(self, client: int, part: str) -> tuple[Array, Array]:
        """Return the changed (x, y) of a client's part, as `Partition.arrays` does."""
        return self.change(client, *super().arrays(client, part))


def changed(parts: Partition, change: Change) -> Changed:
    """Return the same partition with `change` applied to each client's samples."""
    return Changed(**vars(parts), change=change)


def fewer(parts: Partition, samples: int, seed: int) -> Partition:
    """Keep at most `samples` random training samples of each client. A smaller number keeps a subset of a larger one."""

    def some(client: int, positions: Positions) -> Positions:
        order = np.random.default_rng(derive(seed, "recipe", "fewer", client)).permutation(len(positions))
        return np.sort(positions[order[:samples]])

    return replace(parts, train=tuple(some(client, positions) for client, positions in enumerate(parts.train)))


def minute(parts: Partition, dataset: Dataset, group: str, windows: int, seed: int) -> Partition:
    """Keep `windows` training windows of each class, as a person would label them.

    The first windows of unbroken runs are kept, with the runs in random order.

    Args:
        parts: The partition.
        dataset: Its data set.
        group: The label array with the runs. Positions within a run are in the order of time.
        windows: How many windows of each class.
        seed: Decides the order of runs.
    """
    run, index = dataset.further(group), dataset.class_indices()

    def some(client: int, positions: Positions) -> Positions:
        rng = np.random.default_rng(derive(seed, "recipe", "minute", client))
        kept: list[int] = []
        for label in np.unique(index[positions]):
            of_class = positions[index[positions] == label]
            order = rng.permutation(np.unique(run[of_class]))
            in_order = np.concatenate([of_class[run[of_class] == number] for number in order])
            kept += in_order[:windows].tolist()
        return np.sort(np.array(kept, dtype=np.int64))

    return replace(parts, train=tuple(some(client, positions) for client, positions in enumerate(parts.train)))


def relabelled(parts: Partition, groups: int, seed: int) -> Partition:
    """Give each group of clients its own labels: client i is in group i mod `groups`.

    The first group keeps the labels. Each other group has a random permutation of them.
    """
    classes = np.array(parts.dataset.classes)
    drawn = [
        np.random.default_rng(derive(seed, "recipe", "labels", group)).permutation(len(classes)) for group in range(groups)
    ]

    def change(client: int, x: Array, y: Array) -> tuple[Array, Array]:
        group = client % groups
        return (x, y) if not group else (x, classes[drawn[group][np.searchsorted(classes, y)]])

    return changed(parts, change)


def turned(parts: Partition, ways: int) -> Partition:
    """Turn or mirror images (n, H, W, C): client i sees them in way i mod `ways` of four quarter turns, then these mirrored."""

    def change(client: int, x: Array, y: Array) -> tuple[Array, Array]:
        way = client % ways
        seen = np.rot90(x, way % 4, axes=(1, 2))
        return (seen[:, :, ::-1] if way >= 4 else seen).copy(), y

    return changed(parts, change)


def mounted(x: Array, mounting: int, seed: int) -> Array:
    """Rotate series (n, T, 3 A) of A sensors with three axes, as if the phone was mounted in another direction.

    Mounting 0 changes nothing. The rotation of another mounting is Q of the QR factors of a normal matrix, with determinant 1.
    """
    if not mounting:
        return x
    rng = np.random.default_rng(derive(seed, "recipe", "mounting", mounting))
    q, r = np.linalg.qr(rng.normal(size=(3, 3)))
    q = q * np.sign(np.diag(r))
    q[:, 0] *= np.linalg.det(q)
    sensors = x.reshape(*x.shape[:-1], -1, 3)
    return np.asarray((sensors @ q.T).reshape(x.shape), dtype=np.float32)


def features(x: Array) -> Array:
    """Return features (n, 8 C) of windows (n, T, C).

    Each channel has mean, deviation, minimum, maximum, mean step, and the share of its energy (without the mean) at low,
    middle and high frequencies.
    """
    power = np.abs(np.fft.rfft(x - x.mean(axis=1, keepdims=True), axis=1)) ** 2
    total = power.sum(axis=1) + 1e-9
    edges = (1, 4, 12, power.shape[1])  # of 128 samples at 50 Hz: 0.4, 1.6, 4.7 Hz
    bands = [power[:, low:high].sum(axis=1) / total for low, high in pairwise(edges)]
    steps = np.abs(np.diff(x, axis=1)).mean(axis=1)
    return np.concatenate([x.mean(1), x.std(1), x.min(1), x.max(1), steps, *bands], axis=1).astype(np.float32)
