"""Schemes for classes that come in coarse classes, as CIFAR-100's: Pachinko allocation and siblings (experiments of FedTP).

N clients, G coarse classes, F fine classes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from attune.common.errors import SettingError, ShardError
from attune.simulation.partition.samples import Dataset, Positions
from attune.simulation.partition.schemes.cut import Counts, Cut, Shares, generator
from attune.simulation.partition.schemes.scheme_settings import Coarse5Settings, PachinkoSettings
from attune.simulation.partition.schemes.shares import deal, hand_out, per_class


def parents(data: Dataset, coarse: str) -> tuple[Counts, list[str]]:
    """Return the coarse class of every fine class as 0..G-1, (F,), and the names of the G coarse classes.

    Raises:
        SettingError: There is no such label array.
        ShardError: A class lies in two coarse classes, or has no samples.
    """
    names, coarse_n = np.unique(data.further(coarse), return_inverse=True)
    fine_n, coarse_n = data.class_indices(), coarse_n.reshape(-1)
    table = np.zeros((len(data.classes), len(names)), dtype=np.int64)
    np.add.at(table, (fine_n, coarse_n), 1)
    for label, count_G in zip(data.classes, table, strict=True):
        if (count_G > 0).sum() != 1:
            raise ShardError(
                f"class {label!r} of {data.name} lies in {(count_G > 0).sum()} coarse classes by the array {coarse!r}; "
                "every class must lie in exactly one"
            )
    return table.argmax(axis=1), [str(name) for name in names]


def pachinko(data: Dataset, clients: int, settings: PachinkoSettings, seed: int) -> Cut:
    """Divide a data set by Pachinko allocation.

    Both parts are pooled. One client after another draws n/N samples: for each a coarse class by Dir(alpha), then a fine
    class of it by Dir(beta). Drawn samples of the original test part are the client's test part.

    Raises:
        SettingError: A client got no sample of one part, or there are no coarse classes.
        ShardError: As in `parents`.
    """
    rng = generator(seed, "pachinko")
    parent_F, groups = parents(data, settings.coarse)
    fine_n = data.class_indices()
    stock = [rng.permutation(np.flatnonzero(fine_n == f)) for f in range(len(parent_F))]
    left_F = np.array([len(members) for members in stock])
    mine: list[Positions] = []
    for _ in range(clients):
        theta_G = rng.dirichlet(np.full(len(groups), settings.alpha))
        phi_F = np.zeros(len(parent_F))
        for g in range(len(groups)):
            inside = np.flatnonzero(parent_F == g)
            phi_F[inside] = rng.dirichlet(np.full(len(inside), settings.beta))
        count_F = draw(theta_G, phi_F, parent_F, left_F, len(data) // clients, rng)
        pieces = [members[left - count : left] for members, left, count in zip(stock, left_F, count_F, strict=True)]
        mine.append(np.sort(np.concatenate(pieces)))
        left_F = left_F - count_F
    split = len(data.train_y)
    train, test = tuple(cut[cut < split] for cut in mine), tuple(cut[cut >= split] for cut in mine)
    if not all(len(cut) for cut in train + test):
        raise SettingError(f"{clients} clients are too many: some drew no training or no test sample; take fewer --clients")
    return Cut(data, train, test)


def draw(theta_G: Shares, phi_F: Shares, parent_F: Counts, left_F: Counts, count: int, rng: np.random.Generator) -> Counts:
    """Return how many samples of every fine class `count` draws without replacement take from a stock of `left_F`, (F,).

    When a fine class is empty, it is dropped and the shares of its siblings are renormalised. Empty coarse classes are dropped
    likewise. If no class with a share has samples left, all classes with samples are equally likely.
    """
    taken_F = np.zeros(len(left_F), dtype=np.int64)
    while (missing := count - int(taken_F.sum())) > 0:
        room_F = left_F - taken_F
        edge_F = np.cumsum(_chances(theta_G, phi_F, parent_F, room_F > 0))
        drawn = np.searchsorted(edge_F, rng.random(missing) * edge_F[-1], side="right")
        drawn = np.minimum(drawn, np.flatnonzero(room_F)[-1])
        for f in np.unique(drawn):
            place = np.flatnonzero(drawn == f)
            if len(place) >= room_F[f]:  # draws after the class ran out used its share, so they are repeated
                drawn = drawn[: place[room_F[f] - 1] + 1]
        taken_F += np.bincount(drawn, minlength=len(left_F))
    return taken_F


def _chances(theta_G: Shares, phi_F: Shares, parent_F: Counts, there_F: npt.NDArray[np.bool_]) -> Shares:
    phi_F = np.where(there_F, phi_F, 0.0)
    sum_G = np.bincount(parent_F, weights=phi_F, minlength=len(theta_G))
    chance_F = np.divide(theta_G[parent_F] * phi_F, sum_G[parent_F], out=np.zeros(len(phi_F)), where=sum_G[parent_F] > 0)
    return chance_F if chance_F.sum() > 0 else there_F.astype(np.float64)


def siblings(data: Dataset, clients: int | None, settings: Coarse5Settings, seed: int) -> Cut:
    """Divide a data set among s siblings for each coarse class.

    Clients s*c to s*c + s-1 belong to coarse class c. Each gets 1/s of each of its fine classes, or one of them.

    Raises:
        SettingError: The number of clients is not G*s, there are too few samples, or `each` is "one-class" and a coarse class
            does not have s fine classes.
        ShardError: As in `parents`.
    """
    rng = generator(seed, "coarse5")
    parent_F, groups = parents(data, settings.coarse)
    train_F, test_F = per_class(data)
    total = len(groups) * settings.siblings
    if clients not in (None, total):
        raise SettingError(
            f"--clients is {clients}, but {len(groups)} coarse classes with {settings.siblings} clients each make {total}; "
            "leave --clients out, or change --set siblings"
        )
    train_NF, test_NF = (np.zeros((total, len(parent_F)), dtype=np.int64) for _ in range(2))
    for g, name in enumerate(groups):
        fine = np.flatnonzero(parent_F == g)
        rows = slice(g * settings.siblings, (g + 1) * settings.siblings)
        if settings.fine_classes == "one-class":
            if len(fine) != settings.siblings:
                raise SettingError(
                    f"coarse class {name} has {len(fine)} classes, not one for each of {settings.siblings} clients"
                )
            owner = np.arange(total)[rows]
            train_NF[owner, fine], test_NF[owner, fine] = train_F[fine], test_F[fine]
            continue
        for f in fine:
            share_N = np.full(settings.siblings, 1 / settings.siblings)
            train_NF[rows, f], test_NF[rows, f] = deal(train_F[f], test_F[f], share_N, rng.permutation(settings.siblings))
    return hand_out(data, train_NF, test_NF, rng)
