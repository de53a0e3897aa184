"""Partition of one data set into the shards of several clients, its files on disk, and its overview: a table and a picture.

N clients, C classes.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from attune.common.config import convert
from attune.common.durable import NO_SPACE, PUBLIC, write_file
from attune.common.errors import DiskFull, SettingError, ShardError
from attune.common.pictures import figures
from attune.common.text import aligned, listed
from attune.fedclient.data.arrays import Array, write_arrays
from attune.fedclient.data.meta import Meta
from attune.simulation.partition.samples import (
    CLASS,
    Corpus,
    Dataset,
    Normaliser,
    Positions,
    Source,
    add_noise,
    noise_levels,
    normaliser,
    with_classes,
)
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
    normaliser: Normaliser | None = None
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
        sigma = float(noise_levels(len(self.names), self.noise)[client])
        return (add_noise(x, sigma, self.seed, client, part) if sigma else x), y


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
        normaliser=normaliser(_without_tested(cut) if how == "channel" else cut.dataset, how),
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
    sigma_N = noise_levels(len(parts.names), parts.noise)
    rows = [
        {"shard": name, "train": len(train), "test": len(test), "sigma": float(sigma)}
        for name, train, test, sigma in zip(parts.names, parts.train, parts.test, sigma_N, strict=True)
    ]
    return {"dataset": parts.dataset.name, **parts.settings, "notes": list(parts.notes), "clients": rows}


_MAX_COLUMNS = 20  # of the table; with more classes it shows only how many each client has
_MAX_CELLS = 400  # of the picture that show their number
_MAX_TICKS = 40
_MAX_LINES = 150  # between rows, and between columns: more would hide the cells
_SKEW = 20  # colours are logarithmic if the largest count is this many times the median
_MAX_ROWS = 60  # of the table; with more clients it shows the first ones and the spread of sizes


def table(parts: Partition) -> str:
    """Return a table with a line for each client: training samples of each class, and both totals.

    With many classes a line has only the number of classes. Classes of text are characters, counted at every position. With
    many clients only the first are shown.
    """
    count_NC = parts.counts()
    many = count_NC.shape[1] > _MAX_COLUMNS
    heads = ["classes"] if many else [_called(parts, c) for c in range(count_NC.shape[1])]
    rows = [["client", *heads, "train", "test"]]
    shown = len(parts.names) if len(parts.names) <= _MAX_ROWS else _MAX_ROWS // 2
    for name, count_C, train, test in list(zip(parts.names, count_NC, parts.train, parts.test, strict=True))[:shown]:
        cells = [str((count_C > 0).sum())] if many else [str(count) if count else "." for count in count_C]
        rows.append([name, *cells, str(len(train)), str(len(test))])
    hidden = len(parts.names) - shown
    more = [f"... and {hidden} more clients", _spread(parts)] if hidden else []
    return "\n".join([f"{parts.title} (training samples by class)", *aligned(rows), *more])


def _called(parts: Partition, c: int) -> str:
    names = parts.dataset.called.get(CLASS)
    return names[c] if names else str(parts.dataset.classes[c])


def _spread(parts: Partition) -> str:
    size_N = np.array([len(train) + len(test) for train, test in zip(parts.train, parts.test, strict=True)])
    low, middle, high = int(size_N.min()), float(np.median(size_N)), int(size_N.max())
    return f"{len(size_N)} clients with {int(size_N.sum())} samples: at least {low}, median {middle:g}, at most {high}"


def save_picture(parts: Partition, path: Path) -> None:
    """Write a PNG with a row for each client and a column for each class. Darker cells have more training samples.

    Raises:
        SettingError: matplotlib is not installed.
        ShardError: `path` cannot be written.
    """
    count_NC = parts.counts()
    clients, classes = count_NC.shape
    width, height = min(max(5.0, 2.2 + 0.55 * classes), 16), min(max(3.0, 1.6 + 0.34 * clients), 24)
    figure = figures.new(width, height)
    from matplotlib.colors import LogNorm, Normalize

    axes = figure.add_subplot()
    highest = max(int(count_NC.max()), 1)
    skewed = count_NC.any() and highest > _SKEW * np.median(count_NC[count_NC > 0])
    norm = LogNorm(1, highest) if skewed else Normalize(0, highest)
    image = axes.imshow(np.ma.masked_equal(count_NC, 0), cmap="YlGnBu", norm=norm, aspect="auto", interpolation="nearest")
    axes.set_title(textwrap.fill(parts.title, int(10 * width)))
    axes.set_xlabel("class")
    axes.set_ylabel("client (train + test)")
    shown_C, shown_N = (range(0, size, -(-size // _MAX_TICKS)) for size in (classes, clients))
    axes.set_xticks(shown_C, [_called(parts, c) for c in shown_C], rotation=90 if classes > _MAX_COLUMNS else 0)
    axes.set_yticks(shown_N, [f"{parts.names[n]} ({len(parts.train[n])} + {len(parts.test[n])})" for n in shown_N])
    if max(clients, classes) <= _MAX_LINES:
        axes.set_xticks(np.arange(classes + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(clients + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="0.9", linewidth=0.8)
        axes.tick_params(which="minor", length=0)
    if clients * classes <= _MAX_CELLS:
        for n, c in np.argwhere(count_NC):
            dark = norm(count_NC[n, c]) > 0.55
            axes.text(c, n, str(count_NC[n, c]), ha="center", va="center", fontsize=8, color="white" if dark else "black")
    what = "training positions" if parts.dataset.train_y.ndim == 2 else "training samples"
    figure.colorbar(image, ax=axes, label=f"{what} (white: none)")
    try:
        path.write_bytes(figures.file_of(figure))
    except OSError as error:
        raise ShardError(f"cannot write the picture {path}: {error.strerror or error}") from None
