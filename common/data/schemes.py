"""Which share of every class a client gets: iid, pathological and Dirichlet (FedTP, section IV-A; FedMCSA's two classes).

N clients, C classes. A class is dealt by `deal`, the same shares cutting its training and its test samples.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from common.errors import SettingError

Shares = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
MAX_DRAWS = 1_000
MIN_SAMPLES = 10  # of each part, for every client of a Dirichlet partition


def quotas(total: int, share_N: Shares, rank_N: Counts) -> Counts:
    """`total` samples by largest remainder: every client gets its exact quota rounded down or up; `rank_N` breaks ties."""
    exact_N = total * share_N
    count_N = np.floor(exact_N + 1e-9).astype(np.int64)
    order_N = np.lexsort((rank_N, -np.round(exact_N - count_N, 9)))
    count_N[order_N[: total - int(count_N.sum())]] += 1
    return count_N


def deal(train: int, test: int, share_N: Shares, rank_N: Counts) -> tuple[Counts, Counts]:
    """(training, test) counts of one class for every client, at least one of each or none of both.

    A client whose share comes to nothing in one part gets nothing of the class, and the others' shares grow in proportion.
    The largest share always comes to something in both parts, so this ends.
    """
    share_N = share_N / share_N.sum()
    while True:
        train_N, test_N = quotas(train, share_N, rank_N), quotas(test, share_N, rank_N)
        lopsided_N = (train_N > 0) != (test_N > 0)
        if not lopsided_N.any():
            return train_N, test_N
        share_N = np.where(lopsided_N, 0.0, share_N)
        share_N = share_N / share_N.sum()


def iid(train_C: Counts, test_C: Counts, clients: int, rng: np.random.Generator) -> tuple[Counts, Counts]:
    """Every client gets the same share of every class. Returns counts (N, C) of both parts."""
    return _deal_all(train_C, test_C, lambda _: np.full(clients, 1 / clients), clients, rng)


def pathological(
    train_C: Counts, test_C: Counts, clients: int, classes_per_client: int, rng: np.random.Generator
) -> tuple[Counts, Counts]:
    """Every client owns K classes, every class has N*K/C owners, who share it in proportion to draws from U(0.4, 0.6).

    Errors: SettingError if N*K/C is no whole number, K is more than C, or a class has too few samples for its owners.
    """
    owner_NC = owners(clients, classes_per_client, len(train_C), rng)
    share_NC = np.where(owner_NC, rng.uniform(0.4, 0.6, owner_NC.shape), 0.0)
    train_NC, test_NC = _deal_all(train_C, test_C, lambda c: share_NC[:, c], clients, rng)
    if ((train_NC > 0) != owner_NC).any():
        each = clients * classes_per_client // len(train_C)
        raise SettingError(
            f"a class has too few samples for its {each} clients (the smallest has {train_C.min()} "
            f"to train and {test_C.min()} to test); take fewer --clients or --classes-per-client"
        )
    return train_NC, test_NC


def owners(clients: int, classes_per_client: int, classes: int, rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    """(N, C), who owns what: client after client takes the K classes that lack most owners, ties at random."""
    if not 1 <= classes_per_client <= classes:
        raise SettingError(f"--classes-per-client is {classes_per_client}; this data set has {classes} classes")
    owners_each, rest = divmod(clients * classes_per_client, classes)
    if rest:
        step = classes // np.gcd(classes, classes_per_client)
        raise SettingError(
            f"{clients} clients with {classes_per_client} of {classes} classes each cannot give every class equally many "
            f"clients; make --clients a multiple of {step}, or change --classes-per-client"
        )
    left_C = np.full(classes, owners_each)
    owner_NC = np.zeros((clients, classes), dtype=bool)
    for owner_C in owner_NC:
        chosen = np.lexsort((rng.random(classes), -left_C))[:classes_per_client]
        owner_C[chosen] = True
        left_C[chosen] -= 1
    return owner_NC


def dirichlet(train_C: Counts, test_C: Counts, clients: int, alpha: float, rng: np.random.Generator) -> tuple[Counts, Counts]:
    """Per class shares ~ Dir(alpha), over the clients that hold fewer than n_train/N samples so far.

    (Zeroing the others' shares of a Dirichlet draw and renormalising gives the same distribution.) Repeated until every client
    has 10 samples in both parts. Errors: SettingError after 1,000 draws, or at once if there are too few samples.
    """
    enough = min(int(train_C.sum()), int(test_C.sum())) >= MIN_SAMPLES * clients
    for _ in range(MAX_DRAWS if enough else 0):
        train_NC, test_NC = _draw_dirichlet(train_C, test_C, clients, alpha, rng)
        if min(train_NC.sum(axis=1).min(), test_NC.sum(axis=1).min()) >= MIN_SAMPLES:
            return train_NC, test_NC
    why = f"{MAX_DRAWS} Dirichlet draws" if enough else "the data set"
    raise SettingError(
        f"{why} gave some of the {clients} clients fewer than {MIN_SAMPLES} training or test samples ({train_C.sum()} and "
        f"{test_C.sum()} in all); take fewer --clients or a larger --alpha than {alpha:g}"
    )


def _draw_dirichlet(
    train_C: Counts, test_C: Counts, clients: int, alpha: float, rng: np.random.Generator
) -> tuple[Counts, Counts]:
    train_NC, test_NC = (np.zeros((clients, len(train_C)), dtype=np.int64) for _ in range(2))
    cap = train_C.sum() / clients
    for c, (train, test) in enumerate(zip(train_C, test_C, strict=True)):
        open_N = np.flatnonzero(train_NC.sum(axis=1) < cap)
        share_N = np.zeros(clients)
        share_N[open_N] = rng.dirichlet(np.full(len(open_N), alpha))
        train_NC[:, c], test_NC[:, c] = deal(train, test, share_N, rng.permutation(clients))
    return train_NC, test_NC


def _deal_all(
    train_C: Counts, test_C: Counts, share: Callable[[int], Shares], clients: int, rng: np.random.Generator
) -> tuple[Counts, Counts]:
    train_NC, test_NC = (np.zeros((clients, len(train_C)), dtype=np.int64) for _ in range(2))
    for c, (train, test) in enumerate(zip(train_C, test_C, strict=True)):
        train_NC[:, c], test_NC[:, c] = deal(train, test, share(c), rng.permutation(clients))
    return train_NC, test_NC
