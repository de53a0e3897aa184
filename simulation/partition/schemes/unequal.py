"""Scheme two-class-unequal: FedMCSA's MNIST, Fashion-MNIST and CIFAR-10.

Both parts are pooled; client u gets the classes (K u, ..., K u + K - 1) mod C, in unequal pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attune.common.errors import SettingError
from attune.simulation.partition.samples import Dataset, Positions
from attune.simulation.partition.schemes.cut import Counts, Cut, generator, legacy, owners_per_class, stratified
from attune.simulation.partition.schemes.scheme_settings import UnequalSettings


def unequal(data: Dataset, clients: int, settings: UnequalSettings, seed: int) -> Cut:
    """Divide a data set into consecutive classes of unequal sizes.

    The sizes are those that the published code draws with the same seed. The samples are drawn independently of them.

    Raises:
        SettingError: N*K/C is no whole number, K is more than C, or a class is too small for its owners.
    """
    classes, per_client = len(data.classes), settings.classes_per_client
    count = owners_per_class(clients, per_client, classes)
    index, rng = data.class_indices(), generator(seed, "two-class-unequal")
    size_CM = sizes(np.bincount(index, minlength=classes), count, legacy(seed))
    mine: list[list[Positions]] = [[] for _ in range(clients)]
    for c, size_M in enumerate(size_CM):
        members = rng.permutation(np.flatnonzero(index == c))
        for m, piece in enumerate(np.split(members, np.cumsum(size_M)[:-1])):
            mine[(m * classes + c) // per_client].append(piece)
    whole = [np.sort(np.concatenate(pieces)) for pieces in mine]
    test = [stratified(index[cut], settings.test, rng) for cut in whole]
    return Cut(
        data,
        tuple(cut[~mask] for cut, mask in zip(whole, test, strict=True)),
        tuple(cut[mask] for cut, mask in zip(whole, test, strict=True)),
    )


def sizes(total_C: Sequence[int] | Counts, owners: int, draws: np.random.RandomState) -> Counts:
    """Return the samples of each of a class's M owners in turn, (C, M): randint(left/(M+1), left/2), and the rest for the last.

    Raises:
        SettingError: A class is too small for its owners.
    """
    size_CM = np.zeros((len(total_C), owners), dtype=np.int64)
    for c, left in enumerate(map(int, total_C)):
        for m in range(owners - 1):
            low, high = left // (owners + 1), left // 2
            if not 0 < low < high:
                raise SettingError(
                    f"a class of {total_C[c]} samples is too small for its {owners} clients; take fewer --clients"
                )
            size_CM[c, m] = draws.randint(low, high)
            left -= int(size_CM[c, m])
        size_CM[c, -1] = left
    return size_CM
