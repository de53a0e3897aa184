"""Shards: a device's samples, read from a folder with train.npz (test.npz, meta.json), an .npz file or a table, and checked."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from attune.common.errors import SettingError, ShardError
from attune.common.plan import Columns, Kind, Label, Profile
from attune.common.schema import Schema, wrong_with
from attune.common.seeds import derive
from attune.common.task import TASKS, TaskName
from attune.common.text import clean, listed
from attune.fedclient.data import cautions, findings, holdout, kinds, labels, stand_ins
from attune.fedclient.data.arrays import Array
from attune.fedclient.data.cells import WORDS, numbers_in, words_of
from attune.fedclient.data.meta import Meta, Standardise
from attune.fedclient.data.source import read_source
from attune.fedclient.data.standardiser import filled, medians, with_nan
from attune.fedclient.data.table_encoder import TableEncoder
from attune.fedclient.read_options import PLAIN, ReadOptions

Declared = Literal["classes", "vocabulary"]  # names of Meta


@dataclass(frozen=True)
class Shard:
    """One device's samples as saved, with the axes of their kind, and the facts about them.

    Attributes:
        train_x: Images (N, H, W, C), tokens (N, T), series (N, T, C) or tabular (N, F).
        train_y: (N,) int64 or text; (N, T) or (N, H, W) with a label at every position; (N, K) float64 in other tasks.
        test_x, test_y: Same as `train_x` and `train_y`.
        declared_classes: All classes of the federation, if declared; in other tasks the names of the K columns of y.
        vocabulary: Number of tokens; 0 for other kinds.
        standardise: How features of series and tables are scaled.
        warnings: Notes for the user.
        groups: Group of each training sample, (N,). Samples of one group overlap or belong together.
        test_groups: Group of each test sample.
        column_names: Names of features (tabular) or channels (series, images), in order; empty if not known.
        fill: Values in place of missing ones, (F,): medians over the training part. None if none may be missing.
        missing_words: Words that mean a missing value, if the user named them; only of tables and series.
        held_hashes: Hashes of a table's rows that the device holds out (fedclient.data.holdout).
        schema: The schema by which the features were made from a table.
        train_gaps, test_gaps: By a schema, which features were missing before `fill` took their place, (N, F).
        declares: What meta.json declares, in place of what occurs in the samples.
    """

    path: Path
    name: str
    kind: Kind
    train_x: Array
    train_y: Array
    test_x: Array
    test_y: Array
    declared_classes: list[Label] | None
    vocabulary: int
    standardise: Standardise
    warnings: tuple[str, ...]
    groups: Array | None = None
    test_groups: Array | None = None
    column_names: tuple[str, ...] = ()
    task: TaskName = "classes"
    fill: npt.NDArray[np.float64] | None = None
    missing_words: tuple[str, ...] = ()
    held_hashes: tuple[str, ...] = ()
    schema: Schema | None = None
    train_gaps: npt.NDArray[np.bool_] | None = None
    test_gaps: npt.NDArray[np.bool_] | None = None
    declares: frozenset[Declared] = frozenset()

    @property
    def per_position(self) -> bool:
        """True if every position of a sequence or every pixel of an image has a label, not only every sample."""
        return self.task == "classes" and self.train_y.ndim > 1

    @property
    def test_places(self) -> npt.NDArray[np.intp] | None:
        """The group of each test sample as a number from 0 on, (N,); None without groups."""
        return None if self.test_groups is None else np.unique(self.test_groups, return_inverse=True)[1]

    @property
    def labels(self) -> list[Label]:
        """Declared or distinct classes; in other tasks the names of the columns of y, or of the outputs."""
        if self.task == "custom":
            return self.declared_classes or list(range(self.train_y.shape[1] if self.train_y.ndim == 2 else 1))
        if self.task != "classes":
            return labels.target_names(self.declared_classes, self.train_y.shape[1], str(self.path), self.task)
        return self.declared_classes or labels.distinct(self.train_y, self.test_y)

    def profile(self) -> Profile:
        """Return all that the server learns about this shard before training."""
        return Profile(
            kind=self.kind,
            shape=tuple(self.train_x.shape[1:]),
            labels=self.labels,
            samples=len(self.train_x),
            test_samples=len(self.test_x),
            vocabulary=self.vocabulary,
            per_position=self.per_position,
            columns=column_sums(self.train_x) if self.over_the_federation else None,
            column_names=list(self.column_names),
            task=self.task,
            targets=column_sums(self.train_y) if self.task == "regression" else None,
            schema=self.schema or msgspec.UNSET,
            rare=labels.is_rare(self.train_y, self.labels) if self.task == "classes" else msgspec.UNSET,
        )

    @property
    def described(self) -> str:
        """Kind, shape, labels and number of samples, for people, on one line."""
        profile = self.profile()
        at = "pixel" if self.kind == "images" else "position"
        labels_ = f"a label at every {at}" if self.per_position else f"{len(profile.labels)} {TASKS[self.task].outputs}"
        what = f"{self.kind} of shape {' x '.join(map(str, profile.shape))}, {labels_}"
        return f"{what}, {profile.samples} samples to train and {profile.test_samples} to test"

    @property
    def digest(self) -> str:
        """A digest of all samples and labels, which tells whether the data have changed."""
        whole = blake2b(digest_size=16)
        for part in (self.train_x, self.train_y, self.test_x, self.test_y):
            whole.update(f"{part.dtype.str} {part.shape}".encode())
            whole.update(np.ascontiguousarray(part).tobytes())
        return whole.hexdigest()

    @property
    def read(self) -> str:
        """The kind of the data, the rows and columns, and the classes with their counts, on one line for the user."""
        shape = " x ".join(map(str, self.train_x.shape[1:]))
        rows = len(self.train_x) + len(self.test_x)
        columns = f" (columns {listed(self.column_names)})" if self.column_names else ""
        what = f"read {rows} samples of the kind {self.kind}, {shape}{columns}"
        if self.task != "classes" or self.per_position:
            return what
        names, counts = np.unique(np.concatenate([self.train_y, self.test_y]), return_counts=True)
        classes = [f"{clean(str(name))} ({count})" for name, count in zip(names.tolist(), counts.tolist(), strict=True)]
        return f"{what}; classes (how many): {listed(classes)}"

    @property
    def over_the_federation(self) -> bool:
        """True if features are standardised by the statistics of all devices. If so, the profile has the column sums."""
        return self.standardise == "federation" and self.kind in ("series", "tabular")


def column_sums(x: Array) -> Columns:
    """Return rows, means and sums of squared deviations of features (N, F) or (N, T, C), or of targets (N, K), in float64."""
    columns = x.reshape(-1, x.shape[-1]).astype(np.float64)
    mean = columns.mean(axis=0)
    return Columns(len(columns), mean.tolist(), np.square(columns - mean).sum(axis=0).tolist())


def load_shard(
    path: Path, seed: int = 0, options: ReadOptions = PLAIN, held: Collection[str] | None = None, tokens: bool = False
) -> Shard:
    """Return the shard or the table at `path`, completely checked.

    Without a test part, floor(N/4) of the N training samples are held out. Images and rows of tables are drawn at random, and
    the draw depends only on `seed` and N; classes are not stratified. If samples overlap or have groups, see
    fedclient.data.holdout. Both parts keep the order of the file.

    Args:
        path: A folder with train.npz, an .npz file or a table.
        seed: Decides which samples are held out.
        options: The task, and how a table is read.
        held: Given by a device: the rows of a table are held out by their hash, and rows with these hashes in any case.
        tokens: Whole numbers (N, T) are declared to be tokens, as meta.json can say too.

    Raises:
        ShardError: A file is unreadable or empty, arrays are missing or have different lengths, meta.json is wrong, or tokens
            are out of range.
        NonFiniteFeatures: Features are NaN or infinite.
        UndeclaredLabels: A label is not in the `classes` of meta.json.
        SettingError: The options do not fit the file.
    """
    path = Path(path)
    source = read_source(path, options)
    name = path.resolve().stem if path.is_file() else path.resolve().name
    hashes = None
    if held is not None and source.table:
        hashes = holdout.row_hashes(*source.train, derive(seed, "held-rows"), source.groups, source.keys)
    return make_shard(
        path,
        name,
        source.train,
        source.test,
        source.meta,
        groups=source.groups,
        seed=seed,
        test_groups=source.test_groups,
        read_notes=source.notes,
        hashed=None if hashes is None else holdout.Hashed(hashes, held or ()),
        keep_gaps=options.missing == "keep",
        tokens=tokens,
    )


def make_shard(
    path: Path,
    name: str,
    train: tuple[Array, Array],
    test: tuple[Array, Array] | None,
    meta: Meta,
    groups: Array | None = None,
    seed: int = 0,
    test_groups: Array | None = None,
    read_notes: Sequence[str] = (),
    hashed: holdout.Hashed | None = None,
    keep_gaps: bool = False,
    tokens: bool = False,
) -> Shard:
    """Return a shard of these arrays, completely checked.

    Args:
        path: Name of the data in messages.
        name: Name of the shard.
        train: x and y of the training part.
        test: x and y of the test part; None to hold it out as `load_shard` does.
        meta: Declared facts about the arrays.
        groups: Group of each training sample, (N,).
        seed: Decides which samples are held out.
        test_groups: Group of each test sample.
        read_notes: What the user should know about the reading.
        hashed: Given to hold rows out by their hashes.
        keep_gaps: Whether NaN stay in a table, for a finished model that fills them in.
        tokens: Whole numbers (N, T) are declared to be tokens.

    Raises:
        AttuneError: As in `load_shard`.
    """
    train_x, train_y = train
    declared = tokens or meta.vocabulary is not None or (meta.task == "classes" and train_y.ndim == 2)
    kind = meta.kind or kinds.infer(train_x, f"x of the training part of {path}", declared)
    notes = list(read_notes)
    if meta.kind is None and kind == "tabular" and train_x.dtype.kind in "iu":
        notes += [kinds.WHOLE_NUMBERS, *cautions.of_long_integers(train_x)]
    if meta.missing == "median" and kind != "tabular":
        raise SettingError(f"--missing median is for tables, and {path} holds {kind}: leave it out")
    gappy = kind == "tabular" and (keep_gaps or meta.missing == "median")
    if kind == "images" and (meta.channels == "first" or (meta.channels is None and kinds.channels_first(train_x.shape))):
        train_x, test = kinds.channels_last(train_x), (kinds.channels_last(test[0]), test[1]) if test is not None else None
        if meta.channels is None:
            notes.append(_channels_note(train_x))
    train_x, train_y = _part(path, "training", train_x, train_y, kind, meta, gappy)
    if not len(train_x):
        raise ShardError(f"{path} holds no training samples; a device needs at least one")
    if kind == "images":
        kinds.check_unlike(train_x, str(path))
    names = _column_names(path, kind, meta, train_x)
    if kind == "tabular" and meta.schema is None:
        notes += stand_ins.of_numbers(train_x, names or [f"column {at}" for at in range(train_x.shape[1])])
    if test is None:
        held = (
            _held_out(holdout.strata(train_y, meta.task), seed, kind, groups)
            if hashed is None
            else holdout.held_out(hashed.rows, hashed.held_before)
        )
        train_x, train_y, test_x, test_y = train_x[~held], train_y[~held], train_x[held], train_y[held]
        groups, test_groups = (None, None) if groups is None else (groups[~held], groups[held])
    elif not test[0].size and not test[1].size:
        test_x, test_y = train_x[:0], train_y[:0]
    else:
        test_x, test_y = _part(path, "test", *test, kind, meta, gappy)
        _check_alike(path, train_x, test_x, train_y, test_y)
    fill = train_gaps = test_gaps = None
    if gappy and not keep_gaps and train_x.dtype.kind == "f":
        empty_fill = None if meta.schema is None else TableEncoder(meta.schema).neutral
        fill = medians(train_x, meta.columns or (), str(path), empty_fill)
        if meta.schema is not None:
            train_gaps, test_gaps = np.isnan(train_x), np.isnan(test_x)
        train_x, test_x = filled(train_x, fill), filled(test_x, fill)
    shard = Shard(
        path=path,
        name=name,
        kind=kind,
        train_x=train_x,
        train_y=train_y,
        test_x=test_x,
        test_y=test_y,
        declared_classes=meta.classes,
        vocabulary=kinds.vocabulary_of(path, kind, meta.vocabulary, train_x, test_x),
        declares=frozenset(name for name in get_args(Declared) if getattr(meta, name)),
        standardise=meta.standardise,
        warnings=tuple(dict.fromkeys([*notes, *cautions.of_parts(train_y, test_y, meta)])),
        groups=groups,
        test_groups=test_groups,
        column_names=names,
        task=meta.task,
        fill=fill,
        missing_words=tuple(meta.missing_words or ()) if kind in ("tabular", "series") else (),
        held_hashes=tuple(sorted({row for row, out in zip(hashed.rows, held, strict=True) if out})) if hashed else (),
        schema=meta.schema,
        train_gaps=train_gaps,
        test_gaps=test_gaps,
    )
    _check_labels(shard)
    findings.tell(shard.warnings)
    return shard


def _part(path: Path, part: str, x: Array, y: Array, kind: Kind, meta: Meta, gappy: bool) -> tuple[Array, Array]:
    if x.ndim == 0:
        raise ShardError(f"x of the {part} part of {path} is a single value; it needs a first axis of samples")
    where = f"x of the {part} part of {path}"
    x = kinds.canonical(x, kind, where)
    if meta.schema is None:
        x = with_nan(x, kind, meta.missing_words or ())
    where_y = f"y of the {part} part of {path}"
    if meta.task == "classes":
        words = WORDS if meta.missing_words is None else words_of(meta.missing_words)
        y = labels.plain_labels(y, len(x), where_y, kinds.positions_of(x, kind), words, meta.classes or ())
    elif meta.task == "custom":
        y = labels.any_numbers(y, len(x), where_y)
    else:
        missing = numbers_in(words_of(meta.missing_words or ()))
        y = labels.target_numbers(y, len(x), where_y, meta.task, missing, meta.classes)
    kinds.check_finite(np.nan_to_num(x, nan=0.0, posinf=np.inf, neginf=-np.inf) if gappy else x, kind, where)
    return x, y


def _channels_note(x: Array) -> str:
    height, width, channels = x.shape[1:]
    return (
        f"the images have their channels first, and are taken as {height} x {width} with {channels} channel"
        f'{"s" if channels > 1 else ""}; "channels": "last" in meta.json takes them as they are'
    )


def _column_names(path: Path, kind: Kind, meta: Meta, x: Array) -> tuple[str, ...]:
    """Return the declared names of columns.

    Raises:
        ShardError: The data have no columns, or the names do not fit them.
    """
    if meta.columns is None:
        return ()
    if kind == "tokens":
        raise ShardError(f"meta.json of {path} names columns, but the data are tokens, which have none")
    if wrong := wrong_with(meta.columns, x.shape[-1]):
        raise ShardError(f"meta.json of {path} has {wrong}")
    return tuple(meta.columns)


def _held_out(y: Array, seed: int, kind: Kind, groups: Array | None) -> npt.NDArray[np.bool_]:
    count, seed = len(y) // 4, derive(seed, "hold-out", len(y))
    if groups is not None:
        return holdout.by_group(y, groups, count, seed)
    if kind in holdout.NEIGHBOURS:
        return holdout.last(y, count)
    held = np.zeros(len(y), dtype=bool)
    held[np.random.default_rng(seed).permutation(len(y))[:count]] = True
    return held


def _check_alike(path: Path, train_x: Array, test_x: Array, train_y: Array, test_y: Array) -> None:
    if train_x.shape[1:] != test_x.shape[1:]:
        raise ShardError(
            f"a training sample of {path} has shape {train_x.shape[1:]}, a test sample {test_x.shape[1:]}; they must agree"
        )
    if (train_x.dtype == np.uint8) != (test_x.dtype == np.uint8) or (train_x.dtype.kind == "f") != (test_x.dtype.kind == "f"):
        raise ShardError(
            f"x of {path} is {train_x.dtype} for training and {test_x.dtype} for testing; save both as the same type"
        )
    if train_y.ndim != test_y.ndim:
        raise ShardError(
            f"y of {path} has shape {train_y.shape} for training and {test_y.shape} for testing; give every position a label "
            "in both, or one label a sample in both"
        )
    if train_y.shape[1:] != test_y.shape[1:]:
        shapes = f"{train_y.shape[1:]} for training and {test_y.shape[1:]} for testing"
        raise ShardError(f"a sample's y of {path} has shape {shapes}; they must agree")
    if len(test_y) and train_y.dtype.kind != test_y.dtype.kind:
        raise ShardError(
            f"y of {path} is {train_y.dtype} for training and {test_y.dtype} for testing; save both as the same type"
        )


def _check_labels(shard: Shard) -> None:
    """Check the labels, or the names of the columns of y, against meta.json.

    Raises:
        UndeclaredLabels: A label is not declared.
        ShardError: The number of names is not the number of columns of y, or test samples have -1 instead of a class.
    """
    if shard.task != "classes":
        _ = shard.labels
        return
    if shard.declared_classes is None:
        labels.check_test_labels(shard.train_y, shard.test_y, str(shard.path))
        return
    for part, y in (("training", shard.train_y), ("test", shard.test_y)):
        labels.to_indices(y, shard.declared_classes, f"the {part} part of {shard.path}")
