"""One data set cut into the shards of several clients, and written to disk.

N clients, C classes.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from common.data import labels, schemes
from common.data.datasets import Dataset
from common.data.meta import Meta
from common.errors import DiskFull, SettingError, ShardError, nearest
from common.seeds import derive

SCHEMES = ("dirichlet", "iid", "pathological")
Indices = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Partition:
    """Who gets which samples: positions in the data set's training and test part, sorted, for every client."""

    dataset: Dataset
    title: str
    names: tuple[str, ...]  # shard0, shard1, ...
    train: tuple[Indices, ...]
    test: tuple[Indices, ...]

    def counts(self, part: str = "train") -> Counts:
        """(N, C) samples of every class that each client has in `part`, "train" or "test"."""
        y, cuts = (self.dataset.train_y, self.train) if part == "train" else (self.dataset.test_y, self.test)
        index = labels.to_indices(y, self.dataset.classes, self.dataset.name)
        return np.stack([np.bincount(index[cut], minlength=len(self.dataset.classes)) for cut in cuts])


def partition(
    dataset: Dataset, scheme: str, clients: int, classes_per_client: int = 2, alpha: float = 0.3, seed: int = 0
) -> Partition:
    """`dataset` cut among `clients` by `iid`, `pathological` (classes_per_client) or `dirichlet` (alpha).

    Every sample goes to at most one client, and a client has the same classes, in the same proportions up to rounding, in both
    parts. The same arguments give the same shards.
    Errors: SettingError (says what to change), ShardError (a class without test samples).
    """
    if scheme not in SCHEMES:
        raise SettingError(f"unknown scheme {scheme!r}{nearest(scheme, SCHEMES)}")
    if clients < 1:
        raise SettingError(f"--clients is {clients}; at least one is needed")
    if not (alpha > 0 and np.isfinite(alpha)):
        raise SettingError(f"--alpha is {alpha}; it must be above 0")
    train_C, test_C = _per_class(dataset)
    rng = np.random.default_rng(derive(seed, "partition", scheme))
    if scheme == "iid":
        train_NC, test_NC = schemes.iid(train_C, test_C, clients, rng)
    elif scheme == "pathological":
        train_NC, test_NC = schemes.pathological(train_C, test_C, clients, classes_per_client, rng)
    else:
        train_NC, test_NC = schemes.dirichlet(train_C, test_C, clients, alpha, rng)
    if not train_NC.sum(axis=1).all():
        raise SettingError(f"{clients} clients are too many for {train_C.sum()} training and {test_C.sum()} test samples")
    detail = {"iid": "", "pathological": f", {classes_per_client} classes a client", "dirichlet": f", alpha {alpha:g}"}[scheme]
    return Partition(
        dataset=dataset,
        title=f"{dataset.name}: {scheme}{detail}, {clients} clients, seed {seed}",
        names=tuple(f"shard{client}" for client in range(clients)),
        train=_hand_out(dataset.train_y, dataset, train_NC, rng),
        test=_hand_out(dataset.test_y, dataset, test_NC, rng),
    )


def _per_class(dataset: Dataset) -> tuple[Counts, Counts]:
    size = len(dataset.classes)
    train_C, test_C = (
        np.bincount(labels.to_indices(y, dataset.classes, dataset.name), minlength=size)
        for y in (dataset.train_y, dataset.test_y)
    )
    for label, train, test in zip(dataset.classes, train_C, test_C, strict=True):
        if not (train and test):
            raise ShardError(
                f"class {label!r} of {dataset.name} has {train} training and {test} test samples; "
                "a partition needs both of every class"
            )
    return train_C, test_C


def _hand_out(y: npt.NDArray[np.generic], dataset: Dataset, count_NC: Counts, rng: np.random.Generator) -> tuple[Indices, ...]:
    index = labels.to_indices(y, dataset.classes, dataset.name)
    mine: list[list[Indices]] = [[] for _ in count_NC]
    for c, count_N in enumerate(count_NC.T):
        members = rng.permutation(np.flatnonzero(index == c))
        for client, piece in enumerate(np.split(members, np.cumsum(count_N))[: len(mine)]):
            mine[client].append(piece)
    return tuple(np.sort(np.concatenate(pieces)) for pieces in mine)


def write_shards(out: Path, parts: Partition) -> list[Path]:
    """Writes out/NAME/{train,test}.npz and meta.json with the classes of the whole data set; returns the folders in order.

    Files of the same names are replaced; the same partition gives the same bytes.
    Errors: ShardError if `out` holds shards beyond these or cannot be written, DiskFull.
    """
    out = Path(out)
    stale = sorted(path.name for path in out.glob("shard*") if path.is_dir() and path.name not in parts.names)
    if stale:
        raise ShardError(f"{out} holds shards of another partition ({', '.join(stale)}); remove them or choose another --out")
    data = parts.dataset
    meta = Meta(classes=data.classes, kind=data.kind, vocabulary=data.vocabulary or None)
    try:
        for name, train, test in zip(parts.names, parts.train, parts.test, strict=True):
            folder = out / name
            folder.mkdir(parents=True, exist_ok=True)
            np.savez(folder / "train.npz", x=data.train_x[train], y=data.train_y[train])
            np.savez(folder / "test.npz", x=data.test_x[test], y=data.test_y[test])
            (folder / "meta.json").write_bytes(msgspec.json.encode(meta) + b"\n")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"no space left for the shards in {out}; free some, or choose another --out") from None
        raise ShardError(f"cannot write shards to {out}: {error.strerror or error}") from None
    return [out / name for name in parts.names]
