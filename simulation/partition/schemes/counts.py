"""Schemes with unequal pieces of classes, pooled from both parts: as many samples as a table says, or FedMCSA's two classes.

Published splits are often given by a table with the samples of each class for each client (`counts`). In FedMCSA's MNIST,
Fashion-MNIST and CIFAR-10 (`two-class-unequal`), client u gets the classes (K u, ..., K u + K - 1) mod C. N clients, C classes.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from attune.common.errors import SettingError
from attune.simulation.partition.samples import Dataset, Positions
from attune.simulation.partition.schemes.cut import Counts, Cut, generator, legacy, owners_per_class, stratified
from attune.simulation.partition.schemes.natural import folders
from attune.simulation.partition.schemes.scheme_settings import CountsSettings, UnequalSettings

COLUMNS = ("client", "label", "samples")


def counts(data: Dataset, clients: int | None, settings: CountsSettings, seed: int) -> Cut:
    """Draw each client's samples of each class, from the pooled parts and without replacement.

    Raises:
        SettingError: The table cannot be read, asks for more samples than there are, or has another number of clients.
    """
    names, count_NC = read_table(Path(settings.table), data)
    if clients not in (None, len(names)):
        raise SettingError(f"--clients is {clients}, and {settings.table} has {len(names)} clients; leave --clients out")
    rng, index = generator(seed, "counts"), data.class_indices()
    mine: list[list[Positions]] = [[] for _ in names]
    for c, count_N in enumerate(count_NC.T):
        members = rng.permutation(np.flatnonzero(index == c))
        if count_N.sum() > len(members):
            there = f"{data.name} has {len(members)}"
            raise SettingError(f"{settings.table} asks for {count_N.sum()} samples of class {data.classes[c]!r}, and {there}")
        for client, piece in enumerate(np.split(members, np.cumsum(count_N))[: len(names)]):
            mine[client].append(piece)
    return _cut(data, mine, settings.test, rng, folders(names))


def _cut(
    data: Dataset, mine: Sequence[list[Positions]], share: float, rng: np.random.Generator, names: tuple[str, ...] = ()
) -> Cut:
    """Return each client's pieces together, of which a share of each class is for testing."""
    whole, index = [np.sort(np.concatenate(pieces)) for pieces in mine], data.class_indices()
    test = [stratified(index[cut], share, rng) for cut in whole]
    train_parts = tuple(cut[~mask] for cut, mask in zip(whole, test, strict=True))
    return Cut(data, train_parts, tuple(cut[mask] for cut, mask in zip(whole, test, strict=True)), names)


def read_table(path: Path, data: Dataset) -> tuple[list[str], Counts]:
    """Return the names of the clients in the table's order, and how many samples of each class each gets, (N, C).

    Raises:
        SettingError: The file is no such table, or names a class that the data do not have.
    """
    if not path.name:
        raise SettingError("scheme counts needs a table: --set table=FILE.csv, with the columns client, label, samples")
    place = {str(label): at for at, label in enumerate(data.classes)}
    row_of: dict[str, Counts] = {}
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file)
            if missing := [name for name in COLUMNS if name not in (table.fieldnames or ())]:
                raise SettingError(f"{path} has no column {', '.join(missing)}; it needs {', '.join(COLUMNS)}")
            for row in table:
                client, label, samples = (str(row[name] or "").strip() for name in COLUMNS)
                where = f"{path}, line {table.line_num}"
                if label not in place:
                    raise SettingError(f"{where}: {data.name} has no class {label!r}; it has {', '.join(place)}")
                if not (client and samples.isascii() and samples.isdigit()):
                    raise SettingError(
                        f"{where}: a client and a whole number of samples are needed, not {client!r}, {samples!r}"
                    )
                count_C = row_of.setdefault(client, np.zeros(len(place), dtype=np.int64))
                if count_C[place[label]]:
                    raise SettingError(f"{where}: client {client} has label {label} twice")
                count_C[place[label]] = int(samples)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SettingError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if not row_of:
        raise SettingError(f"{path} has no rows")
    return list(row_of), np.stack(list(row_of.values()))


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
    return _cut(data, mine, settings.test, rng)


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
