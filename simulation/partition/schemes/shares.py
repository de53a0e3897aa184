"""Schemes by shares of every class: iid, pathological and Dirichlet (FedTP, section IV-A), and those with coarse classes.

For classes that come in coarse classes, as CIFAR-100's, there are Pachinko allocation and siblings (experiments of
FedTP). N clients, G coarse classes, C (or F) fine classes. `deal` divides a class with the same shares for its training and its
test samples.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from attune.common.errors import SettingError, ShardError
from attune.simulation.partition.samples import Dataset, Positions
from attune.simulation.partition.schemes.cut import Counts, Cut, Shares, generator, owners_per_class, quotas
from attune.simulation.partition.schemes.scheme_settings import (
    Coarse5Settings,
    DirichletSettings,
    IidSettings,
    PachinkoSettings,
    PathologicalSettings,
)

MAX_DRAWS = 1_000
MIN_SAMPLES = 10  # of each part, for every client of a Dirichlet partition


def iid(data: Dataset, clients: int, settings: IidSettings, seed: int) -> Cut:
    """Give every client the same share of every class."""
    rng = generator(seed, "iid")
    counts = _deal_all(*per_class(data), lambda *_: np.full(clients, 1 / clients), clients, rng)
    return hand_out(data, *counts, rng)


def pathological(data: Dataset, clients: int, settings: PathologicalSettings, seed: int) -> Cut:
    """Give every client K classes. Every class has N*K/C owners, who share it in proportion to draws from U(0.4, 0.6).

    Raises:
        SettingError: N*K/C is no whole number, K is more than C, or a class has too few samples for its owners.
    """
    rng = generator(seed, "pathological")
    train_C, test_C = per_class(data)
    owner_NC = owners(clients, settings.classes_per_client, len(train_C), rng)
    share_NC = np.where(owner_NC, rng.uniform(0.4, 0.6, owner_NC.shape), 0.0)
    train_NC, test_NC = _deal_all(train_C, test_C, lambda c, _: share_NC[:, c], clients, rng)
    if ((train_NC > 0) != owner_NC).any():
        clients_of_class = clients * settings.classes_per_client // len(train_C)
        raise SettingError(
            f"a class has too few samples for its {clients_of_class} clients (the smallest has {train_C.min()} "
            f"to train and {test_C.min()} to test); take fewer --clients or --classes-per-client"
        )
    return hand_out(data, train_NC, test_NC, rng)


def dirichlet(data: Dataset, clients: int, settings: DirichletSettings, seed: int) -> Cut:
    """Divide each class by shares ~ Dir(alpha) over the clients that have fewer than n_train/N samples so far.

    (A Dirichlet draw whose other shares are set to zero and which is renormalised has the same distribution.) Draws are
    repeated until every client has 10 samples in both parts.

    Raises:
        SettingError: 1,000 draws failed, or there are too few samples.
    """
    rng = generator(seed, "dirichlet")
    train_C, test_C = per_class(data)
    enough = min(int(train_C.sum()), int(test_C.sum())) >= MIN_SAMPLES * clients
    cap = train_C.sum() / clients

    def share(_: int, train_NC: Counts) -> Shares:
        open_N = np.flatnonzero(train_NC.sum(axis=1) < cap)
        drawn_N = np.zeros(clients)
        drawn_N[open_N] = rng.dirichlet(np.full(len(open_N), settings.alpha))
        return drawn_N

    for _ in range(MAX_DRAWS if enough else 0):
        train_NC, test_NC = _deal_all(train_C, test_C, share, clients, rng)
        if min(train_NC.sum(axis=1).min(), test_NC.sum(axis=1).min()) >= MIN_SAMPLES:
            return hand_out(data, train_NC, test_NC, rng)
    why = f"{MAX_DRAWS} Dirichlet draws" if enough else "the data set"
    raise SettingError(
        f"{why} gave some of the {clients} clients fewer than {MIN_SAMPLES} training or test samples ({train_C.sum()} and "
        f"{test_C.sum()} in all); take fewer --clients or a larger --alpha than {settings.alpha:g}"
    )


def per_class(data: Dataset) -> tuple[Counts, Counts]:
    """Return the numbers of training and test samples of every class, (C,) each.

    Raises:
        ShardError: A class has no sample in one part.
    """
    index, split = data.class_indices(), len(data.train_y)
    train_C, test_C = (np.bincount(part, minlength=len(data.classes)) for part in (index[:split], index[split:]))
    for label, train, test in zip(data.classes, train_C, test_C, strict=True):
        if not (train and test):
            raise ShardError(
                f"class {label!r} of {data.name} has {train} training and {test} test samples; "
                "a partition needs both of every class"
            )
    return train_C, test_C


def hand_out(data: Dataset, train_NC: Counts, test_NC: Counts, rng: np.random.Generator) -> Cut:
    """Give the shuffled samples of every class to the clients by these counts."""
    index, split = data.class_indices(), len(data.train_y)
    train = _pieces(index[:split], train_NC, rng)
    return Cut(data, train, tuple(cut + split for cut in _pieces(index[split:], test_NC, rng)))


def _pieces(index: Positions, count_NC: Counts, rng: np.random.Generator) -> tuple[Positions, ...]:
    mine: list[list[Positions]] = [[] for _ in count_NC]
    for c, count_N in enumerate(count_NC.T):
        members = rng.permutation(np.flatnonzero(index == c))
        for client, piece in enumerate(np.split(members, np.cumsum(count_N))[: len(mine)]):
            mine[client].append(piece)
    return tuple(np.sort(np.concatenate(pieces)) for pieces in mine)


def deal(train: int, test: int, share_N: Shares, rank_N: Counts) -> tuple[Counts, Counts]:
    """Return (training, test) counts of one class for every client: at least one of each, or none of both.

    If a client's share rounds to zero in one part, it gets no sample of the class, and the others' shares grow in proportion.
    The largest share never rounds to zero, so this ends.
    """
    share_N = share_N / share_N.sum()
    while True:
        train_N, test_N = quotas(train, share_N, rank_N), quotas(test, share_N, rank_N)
        lopsided_N = (train_N > 0) != (test_N > 0)
        if not lopsided_N.any():
            return train_N, test_N
        share_N = np.where(lopsided_N, 0.0, share_N)
        share_N = share_N / share_N.sum()


def owners(clients: int, classes_per_client: int, classes: int, rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Return which client owns which class, (N, C).

    One client after another takes the K classes that lack most owners. Ties are broken at random.

    Raises:
        SettingError: The classes cannot all have equally many owners.
    """
    left_C = np.full(classes, owners_per_class(clients, classes_per_client, classes))
    owner_NC = np.zeros((clients, classes), dtype=bool)
    for owner_C in owner_NC:
        chosen = np.lexsort((rng.random(classes), -left_C))[:classes_per_client]
        owner_C[chosen] = True
        left_C[chosen] -= 1
    return owner_NC


def _deal_all(
    train_C: Counts, test_C: Counts, share: Callable[[int, Counts], Shares], clients: int, rng: np.random.Generator
) -> tuple[Counts, Counts]:
    """Deal class after class by `share(c, train_NC)`, the shares of class c given the training counts so far, (N,)."""
    train_NC, test_NC = (np.zeros((clients, len(train_C)), dtype=np.int64) for _ in range(2))
    for c, (train, test) in enumerate(zip(train_C, test_C, strict=True)):
        train_NC[:, c], test_NC[:, c] = deal(train, test, share(c, train_NC), rng.permutation(clients))
    return train_NC, test_NC


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
