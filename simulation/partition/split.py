"""Partition of one data set into the shards of several clients, and its files on disk.

N clients, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from attune.common.config import convert
from attune.common.durable import NO_SPACE, PUBLIC, write_file
from attune.common.errors import DiskFull, SettingError, ShardError
from attune.common.text import listed
from attune.fedclient.data.arrays import Array, write_arrays
from attune.fedclient.data.meta import Meta
from attune.simulation.partition import features
from attune.simulation.partition.samples import Corpus, Dataset, Positions, Source, with_classes
from attune.simulation.partition.schemes import registry
from attune.simulation.partition.schemes.cut import Cut, generator, stratified

Counts = npt.NDArray[np.int64]
RECORD = "partition.json"
_HELD_OUT = 0.25


@dataclass(frozen=True)
class Partition:
    """Assignment of samples to clients: sorted positions in the data set (its training part, then its test part)."""

    dataset: Dataset
    title: str
    names: tuple[str, ...]  # shard0, shard1, ... or the names of natural clients
    train: tuple[Positions, ...]
    test: tuple[Positions, ...]
    seed: int = 0
    normaliser: features.Normaliser | None = None
    noise: float = 0.0  # of the last client
    notes: tuple[str, ...] = ()
    group: str = ""  # as in Cut
    settings: dict[str, Any] = field(default_factory=dict)  # scheme and effective settings, for partition.json

    def counts(self, part: str = "train") -> Counts:
        """Return how many samples of every class each client has in `part` ("train" or "test"), (N, C); positions of text."""
        size = len(self.dataset.classes)
        cuts = self.train if part == "train" else self.test
        return np.stack([np.bincount(self.dataset.class_indices(cut).reshape(-1), minlength=size) for cut in cuts])

    def positions(self, client: int, part: str) -> Positions:
        """Return the positions of a client's "train" or "test" part in the data set."""
        return (self.train if part == "train" else self.test)[client]

    def arrays(self, client: int, part: str) -> tuple[Array, Array]:
        """Return (x, y) of a client's "train" or "test" part as they are written, with normalisation and noise."""
        x, y = self.dataset.take(self.positions(client, part))
        if self.normaliser is not None:
            x = self.normaliser.apply(x)
        sigma = float(features.noise_levels(len(self.names), self.noise)[client])
        return (features.add_noise(x, sigma, self.seed, client, part) if sigma else x), y


def partition(
    source: Source | None,
    scheme: str,
    clients: int | None = None,
    seed: int = 0,
    *,
    normalise: str | None = None,
    noise: float = 0.0,
    **settings: Any,
) -> Partition:
    """Divide `source` among clients by a scheme (simulation.partition.schemes.registry).

    Every sample goes to at most one client. Equal arguments give equal shards.

    Args:
        source: A data set, a text for `roles`, None for `synthetic`.
        scheme: Name of the scheme.
        clients: How many clients; None takes the scheme's or the data's number.
        seed: Decides all draws.
        normalise: None is the scheme's default, and "channel" if noise > 0.
        noise: sigma_M, the noise of the last client.
        settings: Settings of the scheme.

    Raises:
        SettingError: A setting does not fit; the message says what to change.
        ShardError: A class has no test samples.
    """
    row = registry.get(scheme)
    chosen = convert(row.settings, settings, f"{scheme}.")
    if clients is not None and clients < 1:
        raise SettingError(f"--clients is {clients}; at least one is needed")
    if clients is None and row.clients == "given":
        raise SettingError(f"scheme {scheme} does not know how many clients there are; say --clients")
    if not (noise >= 0 and np.isfinite(noise)):
        raise SettingError(f"--noise is {noise}; it must be 0 or more")
    wanted = row.clients if clients is None and isinstance(row.clients, int) else clients
    cut = row.function()(_fitting(source, scheme, row, seed), wanted, chosen, seed)
    if not all(len(positions) for positions in cut.train):
        raise SettingError(f"{len(cut.train)} clients are too many for the {len(cut.dataset)} samples: some would get none")
    how = normalise or ("channel" if noise and row.normalise == "none" else row.normalise)
    if noise and how == "none":
        raise SettingError("noise is added to normalised features; leave --normalise out or choose channel")
    plain = msgspec.to_builtins(chosen)
    return Partition(
        dataset=cut.dataset,
        title=_title(cut.dataset.name, scheme, plain, len(cut.train), seed, noise),
        names=cut.clients or tuple(f"shard{client}" for client in range(len(cut.train))),
        train=cut.train,
        test=cut.test,
        seed=seed,
        normaliser=features.normaliser(_without_tested(cut) if how == "channel" else cut.dataset, how),
        noise=noise,
        notes=cut.notes,
        group=cut.group or _own_groups(cut),
        settings={"scheme": scheme, "settings": plain, "seed": seed, "normalise": how, "noise": noise},
    )


def _fitting(source: Source | None, scheme: str, row: registry.Scheme, seed: int) -> Source | None:
    """Return the source if the scheme can take it, with a test part held out if the scheme needs one."""
    if row.takes == "nothing":
        if source is not None:
            raise SettingError(f"scheme {scheme} makes its own samples; leave --dataset out")
        return None
    if source is None:
        raise SettingError(f"scheme {scheme} needs a data set to cut; say --dataset")
    if row.takes == "text":
        if not isinstance(source, Corpus):
            raise SettingError(f"scheme {scheme} takes text with roles; {source.name} holds {source.kind}")
        return source
    data = with_classes(source, source.name)
    if not row.test_part or len(data.test_y):
        return data
    return data.parted(stratified(data.class_indices(), _HELD_OUT, generator(seed, "test part")))


def _without_tested(cut: Cut) -> Dataset:
    """Return the data set without the samples of its training part that a client tests."""
    split, tested = len(cut.dataset.train_y), np.concatenate(cut.test)
    if not (tested < split).any():
        return cut.dataset
    return cut.dataset.subset(np.setdiff1d(np.arange(split), tested), np.arange(len(cut.dataset.test_y)))


def _own_groups(cut: Cut) -> str:
    """Return the name of the groups that the data bring with them; empty without any.

    Raises:
        SettingError: A client's training and test part have samples of one group.
    """
    name = cut.dataset.group
    if not name:
        return ""
    group_n = cut.dataset.further(name)
    for train, test in zip(cut.train, cut.test, strict=True):
        if both := np.intersect1d(group_n[train], group_n[test]).tolist():
            raise SettingError(
                f"{len(both)} groups of {cut.dataset.name} would have samples in both parts of a client: take a scheme that "
                "keeps the parts of the shard, such as iid"
            )
    return name


def _title(name: str, scheme: str, settings: dict[str, Any], clients: int, seed: int, noise: float) -> str:
    usual = registry.fields(registry.get(scheme))
    shown = {key: value for key, value in settings.items() if value != usual[key] or (isinstance(value, int | float) and value)}
    detail = "".join(f", {key.replace('_', ' ')} {value}" for key, value in shown.items())
    noisy = f", noise up to {noise:g}" if noise else ""
    return f"{name}: {scheme}{detail}, {clients} clients, seed {seed}{noisy}"


def write_shards(out: Path, parts: Partition) -> list[Path]:
    """Write the shards and return their folders in order.

    Writes out/NAME/{train,test}.npz, meta.json with the classes of the whole data set, and out/partition.json, which says how
    the data were cut. Files of the same names are replaced. Equal partitions give equal bytes.

    Raises:
        ShardError: `out` holds other shards, or cannot be written.
        DiskFull: The disk has no room.
    """
    out = Path(out)
    stale = sorted(path.name for path in out.glob("shard*") if path.is_dir() and path.name not in parts.names)
    if stale:
        raise ShardError(f"{out} holds shards of another partition ({listed(stale)}); remove them or choose another --out")
    data = parts.dataset
    meta = Meta(
        classes=data.classes,
        kind=data.kind,
        vocabulary=data.vocabulary or None,
        groups=parts.group or None,
        columns=list(data.columns) or None,
        standardise=data.standardise,
    )
    try:
        for client, name in enumerate(parts.names):
            folder = out / name
            folder.mkdir(parents=True, exist_ok=True)
            write_file(folder / "meta.json", msgspec.json.encode(meta) + b"\n", PUBLIC, durable=False)
            for part in ("test", "train"):  # train.npz makes the folder a shard, so it comes last
                x, y = parts.arrays(client, part)
                arrays: dict[str, Any] = {"x": x, "y": y}
                if parts.group:
                    arrays[parts.group] = data.further(parts.group)[parts.positions(client, part)]
                write_arrays(folder / f"{part}.npz", arrays)
        (out / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(_record(parts))) + b"\n")
    except (OSError, DiskFull) as error:
        if isinstance(error, DiskFull) or error.errno in NO_SPACE:
            raise DiskFull(f"no space left for the shards in {out}; free some, or choose another --out") from None
        raise ShardError(f"cannot write shards to {out}: {error.strerror or error}") from None
    return [out / name for name in parts.names]


def _record(parts: Partition) -> dict[str, Any]:
    sigma_N = features.noise_levels(len(parts.names), parts.noise)
    rows = [
        {"shard": name, "train": len(train), "test": len(test), "sigma": float(sigma)}
        for name, train, test, sigma in zip(parts.names, parts.train, parts.test, sigma_N, strict=True)
    ]
    return {"dataset": parts.dataset.name, **parts.settings, "notes": list(parts.notes), "clients": rows}
