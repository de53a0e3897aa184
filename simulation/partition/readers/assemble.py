"""Assembly of a checked data set from the arrays that a reader found.

N samples, F features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from attune.common.errors import NonFiniteFeatures, ShardError
from attune.common.plan import Kind, Label
from attune.fedclient.data import cautions, kinds, labels, stand_ins
from attune.fedclient.data.arrays import Array
from attune.fedclient.data.samples import missing_words
from attune.fedclient.data.standardiser import filled, medians, with_nan
from attune.fedclient.read_options import ReadOptions
from attune.simulation.partition.samples import Dataset


@dataclass(frozen=True)
class Raw:
    """Unchecked arrays of a reader: x (N, ...), y (N,) and further labels (N,), for training and perhaps for testing."""

    name: str
    train: tuple[Array, Array]
    test: tuple[Array, Array] | None = None
    more: Mapping[str, Array] = field(default_factory=dict)  # over training and then test samples
    called: Mapping[str, list[str]] = field(default_factory=dict)
    classes: list[Label] | None = None  # all possible classes; None: those that occur
    vocabulary: int = 0  # of tokens; 0: the largest token decides
    columns: Sequence[str] = ()  # names of features, if the form has names
    two_classes: bool = False  # whether y holds what is above a threshold already
    notes: Sequence[str] = ()  # what is strange about the data


def assemble(raw: Raw, options: ReadOptions) -> Dataset:
    """Return the data set, checked by the same rules as a shard (fedclient.data.shard).

    Raises:
        ShardError: Axes, types, lengths or labels do not fit.
        NonFiniteFeatures: There are NaN, and `options` does not fill them in.
    """
    train_x, train_y = raw.train
    test_x, test_y = raw.test if raw.test is not None else (train_x[:0], train_y[:0])
    if not len(train_x):
        raise ShardError(f"{raw.name} holds no training samples")
    if train_x.shape[1:] != test_x.shape[1:] or (train_x.dtype == np.uint8) != (test_x.dtype == np.uint8):
        raise ShardError(
            f"training samples of {raw.name} are {train_x.dtype} of shape {train_x.shape[1:]}, test samples {test_x.dtype} of "
            f"shape {test_x.shape[1:]}; they must agree"
        )
    train_x, test_x = (_shaped(x, options.shape, raw.name) for x in (train_x, test_x))
    kind = kinds.infer(train_x, f"x of {raw.name}", tokens=raw.vocabulary > 0)
    train_x, test_x = (with_nan(x, kind, options.missing_words) for x in (train_x, test_x))
    if options.missing == "median" and train_x.dtype.kind == "f":
        fill = medians(train_x, raw.columns, raw.name)
        train_x, test_x = filled(train_x, fill), filled(test_x, fill)
    parts, words = [], missing_words(options)
    for part, x, y in (("training", train_x, train_y), ("test", test_x, test_y)):
        where = f"the {part} part of {raw.name}"
        x = kinds.canonical(x, kind, f"x of {where}")
        pixels = kinds.positions_of(x, kind) if kind == "images" else ()
        y = y if raw.two_classes else options.classes_of(y, raw.name)
        y = labels.plain_labels(y, len(x), f"y of {where}", pixels, words)
        _check_finite(x, kind, f"x of {where}")
        parts.append((x, y))
    (train_x, train_y), (test_x, test_y) = parts
    notes = [*raw.notes, *cautions.of_outcomes(train_y, test_y, "classes", (), raw.classes is not None)]
    if kind == "tabular":
        notes += stand_ins.of_numbers(train_x, raw.columns or [f"column {at}" for at in range(train_x.shape[1])])
    vocabulary = _vocabulary(raw, train_x, test_x) if kind == "tokens" else 0
    classes = raw.classes if raw.classes is not None and options.threshold is None else labels.distinct(train_y, test_y)
    _check_more(raw, len(train_y) + len(test_y))
    return Dataset(
        raw.name,
        kind,
        train_x,
        train_y,
        test_x,
        test_y,
        classes,
        vocabulary,
        more=dict(raw.more),
        called=dict(raw.called),
        columns=() if options.shape else tuple(raw.columns),
        findings=tuple(dict.fromkeys(notes)),
    )


def _shaped(x: Array, shape: tuple[int, ...], name: str) -> Array:
    if not shape:
        return x
    if np.prod(x.shape[1:], dtype=np.int64) != np.prod(shape, dtype=np.int64):
        wanted = "x".join(map(str, shape))
        raise ShardError(f"a sample of {name} has shape {x.shape[1:]}, which cannot become {wanted}; change --shape")
    return x.reshape(len(x), *shape)


def _check_finite(x: Array, kind: Kind, where: str) -> None:
    try:
        kinds.check_finite(x, kind, where)
    except NonFiniteFeatures as error:
        raise NonFiniteFeatures(f"{error}; --missing median puts a column's median for NaN") from None


def _vocabulary(raw: Raw, train_x: Array, test_x: Array) -> int:
    vocabulary = raw.vocabulary or max(int(part.max()) for part in (train_x, test_x) if part.size) + 1
    if vocabulary > kinds.MAX_VOCABULARY:
        raise ShardError(
            f"the vocabulary of {raw.name} would be {vocabulary}, more than {kinds.MAX_VOCABULARY}; number the tokens from 0 "
            "without gaps, or save features as floats"
        )
    for part in (train_x, test_x):
        kinds.check_tokens(part, vocabulary, f"x of {raw.name}")
    return vocabulary


def _check_more(raw: Raw, samples: int) -> None:
    for name, array in raw.more.items():
        if array.shape != (samples,):
            raise ShardError(
                f"label array {name!r} of {raw.name} has shape {array.shape}, not ({samples},): one label a sample"
            )
