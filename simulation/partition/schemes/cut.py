"""Result of a scheme, and functions that several schemes need: generators, quotas, and the choice of a test part.

N clients, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attune.common.errors import SettingError
from attune.common.seeds import derive
from attune.simulation.partition.samples import Dataset, Positions

Shares = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Cut:
    """Division of a data set: sorted positions in `dataset` for the training and the test part of each client."""

    dataset: Dataset
    train: tuple[Positions, ...]
    test: tuple[Positions, ...]
    clients: tuple[str, ...] = ()  # names of the clients, if the data have names
    notes: tuple[str, ...] = ()  # messages for the user
    group: str = ""  # a label array of the data set: samples of a group stay on one side of every further cut


def generator(seed: int, scheme: str, *what: str | int) -> np.random.Generator:
    """Return the generator of a scheme's draws."""
    return np.random.default_rng(derive(seed, "partition", scheme, *what))


def legacy(seed: int) -> np.random.RandomState:
    """Return NumPy's old generator, whose stream never changes. Published sizes were drawn with it."""
    return np.random.RandomState(seed if 0 <= seed < 2**32 else derive(seed) % 2**32)


def quotas(total: int, share_N: Shares, rank_N: Counts) -> Counts:
    """Divide `total` samples by largest remainder and return the counts, (N,).

    Every client gets its exact quota rounded down or up. `rank_N` breaks ties.
    """
    exact_N = total * share_N
    count_N = np.floor(exact_N + 1e-9).astype(np.int64)
    order_N = np.lexsort((rank_N, -np.round(exact_N - count_N, 9)))
    count_N[order_N[: total - int(count_N.sum())]] += 1
    return count_N


def owners_per_class(clients: int, per_client: int, classes: int) -> int:
    """Return how many clients own each class if every client gets `per_client` classes.

    Raises:
        SettingError: There are fewer classes, or they cannot all have equally many owners.
    """
    if per_client > classes:
        raise SettingError(f"--classes-per-client is {per_client}; this data set has {classes} classes")
    if clients * per_client % classes:
        raise SettingError(
            f"{clients} clients with {per_client} of {classes} classes each cannot give every class equally many clients; "
            f"make --clients a multiple of {classes // np.gcd(classes, per_client)}, or change --classes-per-client"
        )
    return clients * per_client // classes


def stratified(y: npt.NDArray[np.generic], share: float, rng: np.random.Generator) -> Mask:
    """Return which samples are the test part, (n,): n - floor((1 - share) n) random ones, with a quota for each class."""
    total = len(y) - int(np.floor((1 - share) * len(y) + 1e-9))
    values, index, count_C = np.unique(y, return_inverse=True, return_counts=True)
    test_C = quotas(total, count_C / max(len(y), 1), rng.permutation(len(values)))
    mask = np.zeros(len(y), dtype=bool)
    for c, test in enumerate(test_C):
        mask[rng.permutation(np.flatnonzero(index.reshape(-1) == c))[:test]] = True
    return mask


def grouped(y: npt.NDArray[np.generic], group: npt.NDArray[np.generic], share: float, rng: np.random.Generator) -> Mask:
    """Return which samples are the test part, (n,), in whole groups: about `share` of the samples of each class.

    A group counts for its most frequent class. If a class has one group, it is in the training part. If it has more, each
    part gets at least one.
    """
    values, index_n = np.unique(group, return_inverse=True)
    _, class_n = np.unique(y, return_inverse=True)
    table = np.zeros((len(values), int(class_n.max(initial=0)) + 1), dtype=np.int64)
    np.add.at(table, (index_n.reshape(-1), class_n.reshape(-1)), 1)
    size_G, of_G = table.sum(axis=1), table.argmax(axis=1)
    chosen_G = np.zeros(len(values), dtype=bool)
    for c in np.unique(of_G):
        members = rng.permutation(np.flatnonzero(of_G == c))
        wanted, taken = share * size_G[members].sum(), 0
        for place, member in enumerate(members[:-1]):
            if place and taken + size_G[member] / 2 > wanted:
                break
            chosen_G[member] = True
            taken += int(size_G[member])
    return np.asarray(chosen_G[index_n.reshape(-1)])
