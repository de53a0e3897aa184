"""How recipes change a partition: fewer samples of each device, labels or features of its own, a minute of labels. No torch.

N clients, n samples of a client.
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
    """A partition whose samples each client sees in its own way."""

    change: Change = lambda client, x, y: (x, y)

    def arrays(self, client: int, part: str) -> tuple[Array, Array]:
        """As Partition, changed."""
        return self.change(client, *super().arrays(client, part))


def changed(parts: Partition, change: Change) -> Changed:
    """The same samples, and each client sees them in its own way."""
    return Changed(**vars(parts), change=change)


def fewer(parts: Partition, samples: int, seed: int) -> Partition:
    """At most so many training samples of each client, drawn; those of a smaller number are among those of a larger one."""

    def some(client: int, positions: Positions) -> Positions:
        order = np.random.default_rng(derive(seed, "recipe", "fewer", client)).permutation(len(positions))
        return np.sort(positions[order[:samples]])

    return replace(parts, train=tuple(some(client, each) for client, each in enumerate(parts.train)))


def minute(parts: Partition, dataset: Dataset, group: str, windows: int, seed: int) -> Partition:
    """So many training windows of each class: the first ones of unbroken runs in drawn order, as somebody would label them.

    group: the label array with the runs; positions within a run are in the order of time.
    """
    run, index = dataset.further(group), dataset.class_indices()

    def some(client: int, positions: Positions) -> Positions:
        rng = np.random.default_rng(derive(seed, "recipe", "minute", client))
        kept: list[int] = []
        for label in np.unique(index[positions]):
            of_class = positions[index[positions] == label]
            order = rng.permutation(np.unique(run[of_class]))
            in_order = np.concatenate([of_class[run[of_class] == each] for each in order])
            kept += in_order[:windows].tolist()
        return np.sort(np.array(kept, dtype=np.int64))

    return replace(parts, train=tuple(some(client, each) for client, each in enumerate(parts.train)))


def relabelled(parts: Partition, groups: int, seed: int) -> Partition:
    """The clients of a group call the classes alike, others do not: client i is in group i mod `groups`; the first calls them
    by their names, each other one by a permutation that is drawn."""
    classes = np.array(parts.dataset.classes)
    drawn = [
        np.random.default_rng(derive(seed, "recipe", "labels", group)).permutation(len(classes)) for group in range(groups)
    ]

    def change(client: int, x: Array, y: Array) -> tuple[Array, Array]:
        group = client % groups
        return (x, y) if not group else (x, classes[drawn[group][np.searchsorted(classes, y)]])

    return changed(parts, change)


def turned(parts: Partition, ways: int) -> Partition:
    """Images (n, H, W, C) in one of up to eight ways, client i in way i mod `ways`: quarter turns, then these mirrored."""

    def change(client: int, x: Array, y: Array) -> tuple[Array, Array]:
        way = client % ways
        seen = np.rot90(x, way % 4, axes=(1, 2))
        return (seen[:, :, ::-1] if way >= 4 else seen).copy(), y

    return changed(parts, change)


def mounted(x: Array, mounting: int, seed: int) -> Array:
    """Series (n, T, 3 A) of A sensors with three axes each, as a phone would record them that is turned by a drawn rotation.

    Mounting 0 is as recorded. A rotation: Q of the QR factors of a normal matrix, with determinant 1.
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
    """(n, 8 C) numbers of each window (n, T, C): of each channel mean, deviation, least, largest, mean step, and the share of
    the movement (without the mean) at low, middle and high frequencies."""
    power = np.abs(np.fft.rfft(x - x.mean(axis=1, keepdims=True), axis=1)) ** 2
    total = power.sum(axis=1) + 1e-9
    edges = (1, 4, 12, power.shape[1])  # of 128 samples at 50 Hz: 0.4, 1.6, 4.7 Hz
    bands = [power[:, low:high].sum(axis=1) / total for low, high in pairwise(edges)]
    steps = np.abs(np.diff(x, axis=1)).mean(axis=1)
    return np.concatenate([x.mean(1), x.std(1), x.min(1), x.max(1), steps, *bands], axis=1).astype(np.float32)
