"""Data sets and texts in memory, before they are cut: samples with labels, or roles with lines; and changes of features.

There are N samples: those of the training part, then those of the test part. A *position* is a place in that order. H height,
W width, C channels, F features.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from attune.common.errors import SettingError, nearest
from attune.common.plan import Kind, Label
from attune.common.seeds import derive
from attune.fedclient.data import labels
from attune.fedclient.data.arrays import Array
from attune.fedclient.data.makers.alphabets import encode
from attune.fedclient.data.meta import Standardise

Positions = npt.NDArray[np.int64]
CLASS = "class"  # the key of `Dataset.called` for the names of the classes in tables and pictures


@dataclass(frozen=True)
class Dataset:
    """Training and test samples with the axes of their kind (fedclient.data.kinds), and all classes in order.

    The test part may be empty. Then a scheme makes one, or takes it from each client's samples.
    """

    name: str
    kind: Kind
    train_x: Array
    train_y: Array  # (N,); (N, T) for a label at each position of text, (N, H, W) for each pixel
    test_x: Array
    test_y: Array
    classes: list[Label]
    vocabulary: int  # 0 unless the kind is tokens
    more: Mapping[str, Array] = field(default_factory=dict)  # further labels by name, (N,) each, such as "coarse" or "subject"
    called: Mapping[str, list[str]] = field(default_factory=dict)  # names of the values 0, 1, ... of such a label
    standardise: Standardise = True  # on each device, for series and tables: see docs/shards.md
    group: str = ""  # the name in `more` of groups that the data bring with them; they stay together in every cut
    columns: tuple[str, ...] = ()  # names of features (tabular) or channels (series); empty: unknown
    findings: tuple[str, ...] = ()  # what is strange about the data

    def __len__(self) -> int:
        return len(self.train_y) + len(self.test_y)

    @property
    def y(self) -> Array:
        """Labels of all samples."""
        return np.concatenate([self.train_y, self.test_y]) if len(self.test_y) else self.train_y

    def take(self, positions: Positions) -> tuple[Array, Array]:
        """Return (x, y) of the samples at these positions, which must be sorted."""
        first = int(np.searchsorted(positions, len(self.train_y)))
        inner, outer = positions[:first], positions[first:] - len(self.train_y)
        if not len(outer):
            return self.train_x[inner], self.train_y[inner]
        if not len(inner):
            return self.test_x[outer], self.test_y[outer]
        x = np.concatenate([self.train_x[inner], self.test_x[outer]])
        return x, np.concatenate([self.train_y[inner], self.test_y[outer]])

    def further(self, name: str) -> Array:
        """Return the further label of that name, (N,).

        Raises:
            SettingError: There is none; the message has the nearest name.
        """
        if name not in self.more:
            what = nearest(name, self.more) if self.more else ": it has no labels but its classes"
            raise SettingError(f"data set {self.name} has no label array {name!r}{what}")
        return self.more[name]

    def subset(self, train: Positions, test: Positions) -> Dataset:
        """Return the samples at these places of the training and of the test part, with their further labels."""
        kept = np.concatenate([train, test + len(self.train_y)])
        return replace(
            self,
            train_x=self.train_x[train],
            train_y=self.train_y[train],
            test_x=self.test_x[test],
            test_y=self.test_y[test],
            more={name: array[kept] for name, array in self.more.items()},
        )

    def parted(self, test: npt.NDArray[np.bool_]) -> Dataset:
        """Return the same samples with another test part. Each part keeps the order of the samples.

        Args:
            test: (N,), true for samples of the test part.
        """
        inner, outer = np.flatnonzero(~test), np.flatnonzero(test)
        (train_x, train_y), (test_x, test_y) = self.take(inner), self.take(outer)
        more = {name: array[np.concatenate([inner, outer])] for name, array in self.more.items()}
        return replace(self, train_x=train_x, train_y=train_y, test_x=test_x, test_y=test_y, more=more)

    def class_indices(self, positions: Positions | None = None) -> Positions:
        """Return the classes at these positions as indices into `classes`: (N,), for text (N, T). None means all positions.

        The class of an image with a label for every pixel is the one, beside the first, with the largest area, if it has any.
        """
        y = self.y if positions is None else self.take(positions)[1]
        index = labels.to_indices(y, self.classes, self.name)
        if y.ndim <= 2:
            return index
        areas = np.stack([(index == one).sum(axis=(1, 2)) for one in range(len(self.classes))], axis=1)
        areas[:, 0] = areas[:, 1:].sum(axis=1) == 0
        return np.asarray(areas.argmax(axis=1), dtype=np.int64)


@dataclass(frozen=True)
class Corpus:
    """Text by role. All lines of a role are one sequence of tokens, in the order of the text."""

    name: str
    tokens: npt.NDArray[np.uint8]  # (L,) indices into CHARACTERS, role after role
    starts: Positions  # (R + 1,) where each role begins; the last is L
    roles: tuple[str, ...]  # R names

    def __len__(self) -> int:
        return len(self.roles)


Source = Dataset | Corpus


def with_classes(source: Source, name: str) -> Dataset:
    """Return a source as a data set with one class per sample, which schemes by classes can cut. `name`: for errors.

    Raises:
        SettingError: It is text with roles, or has a label for every position.
    """
    if isinstance(source, Corpus):
        raise SettingError(f"{name} is text with roles; cut it with --scheme roles")
    if source.train_y.ndim == 2:
        raise SettingError(f"{name} has a label for every position, so a sample has no single class by which it can be cut")
    return source


def corpus(name: str, said: Iterable[tuple[str, str]]) -> Corpus:
    """Return a corpus of (role, text) pairs, each role once."""
    pairs = list(said)
    tokens = [encode(text) for _, text in pairs]
    starts = np.concatenate([[0], np.cumsum([len(sequence) for sequence in tokens])]).astype(np.int64)
    return Corpus(name, np.concatenate([np.zeros(0, np.uint8), *tokens]), starts, tuple(role for role, _ in pairs))


How = Literal["none", "channel", "pixel", "cifar10", "cifar100"]
HOWS: tuple[str, ...] = get_args(How)
_CHUNK = 4096
_PUBLISHED = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


@dataclass(frozen=True)
class Normaliser:
    """Normalisation (x - mean) / std in float32; uint8 values are divided by 255 first.

    Attributes:
        mean: Has the shape of a sample, or of its last axis.
        std: Likewise.
    """

    mean: npt.NDArray[np.float64]
    std: npt.NDArray[np.float64]

    def apply(self, x: Array) -> npt.NDArray[np.float32]:
        made = np.empty(x.shape, dtype=np.float32)
        for start in range(0, len(x), _CHUNK):
            made[start : start + _CHUNK] = (_numbers(x[start : start + _CHUNK]) - self.mean) / self.std
        return made


def normaliser(data: Dataset, how: str) -> Normaliser | None:
    """Return the normalisation of a data set, or None for "none".

    A deviation of 0 counts as 1.

    Args:
        data: The data set.
        how: "channel" takes mean and deviation of each channel (last axis) over the training part. "pixel" takes them for
            each single feature over both parts (FedMCSA). "cifar10" and "cifar100" are the usual constants of these sets.

    Raises:
        SettingError: The data are tokens, `how` is unknown, or the constants do not fit the data.
    """
    if how not in HOWS:
        raise SettingError(f"unknown normalisation {how!r}{nearest(how, HOWS)}")
    if how == "none":
        return None
    if data.kind == "tokens":
        raise SettingError(f"{data.name} is text, which cannot be normalised or get noise; leave --normalise and --noise out")
    if how in _PUBLISHED:
        if data.kind != "images" or data.train_x.shape[-1] != 3:
            raise SettingError(f"--normalise {how} is for images with 3 channels; take channel for {data.name}")
        mean, std = _PUBLISHED[how]
        return Normaliser(np.array(mean), np.array(std))
    parts = [data.train_x] if how == "channel" else [data.train_x, data.test_x]
    axes = tuple(range(data.train_x.ndim - 1)) if how == "channel" else (0,)
    return _fit(parts, axes)


def _fit(parts: list[Array], axes: tuple[int, ...]) -> Normaliser:
    count = sum(part.size for part in parts) // np.sum(parts[0], axis=axes).size
    mean = np.asarray(sum(piece.sum(axis=axes) for piece in _chunks(parts)) / count)
    square = np.asarray(sum(((piece - mean) ** 2).sum(axis=axes) for piece in _chunks(parts)) / count)
    std = np.sqrt(square)
    std[std == 0] = 1.0
    return Normaliser(mean, std)


def _chunks(parts: list[Array]) -> Iterator[npt.NDArray[np.float64]]:
    for part in parts:
        for start in range(0, len(part), _CHUNK):
            yield _numbers(part[start : start + _CHUNK])


def _numbers(x: Array) -> npt.NDArray[np.float64]:
    return x.astype(np.float64) / 255 if x.dtype == np.uint8 else x.astype(np.float64)


def noise_levels(clients: int, largest: float) -> npt.NDArray[np.float64]:
    """Return the noise of each client, (N,): sigma_i = sigma_M * i / (N - 1) with sigma_M = `largest` (FedTP, figure 10)."""
    return largest * np.arange(clients) / max(clients - 1, 1)


def add_noise(x: Array, sigma: float, seed: int, client: int, part: str) -> npt.NDArray[np.float32]:
    """Return x + N(0, sigma) in float32. The draw depends only on the seed, the client and the part."""
    made = np.array(x, dtype=np.float32)
    rng = np.random.default_rng(derive(seed, "noise", client, part))
    for start in range(0, len(made), _CHUNK):
        piece = made[start : start + _CHUNK]
        piece += np.float32(sigma) * rng.standard_normal(piece.shape, dtype=np.float32)
    return made
