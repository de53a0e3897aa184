"""Labels as plain ints or strings, and their mapping to class indices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from attune.common.errors import ShardError, UndeclaredLabels
from attune.common.plan import Label
from attune.fedclient.data.arrays import Array

_SHOWN = 8


def order(label: Label) -> tuple[bool, Label]:
    """A sort key that also works where integers and strings are mixed: integers first."""
    return isinstance(label, str), label


def plain(y: Array, samples: int, where: str, positions: int = 0) -> Array:
    """Labels as an (N,) array of int64 or of text, or (N, T) where T `positions` may each have one.

    Booleans and integral floats become integers. Errors: ShardError for another shape than (samples,) or (samples, positions),
    and for labels that are neither integers nor text.
    """
    if y.ndim != 1 and not (positions and y.ndim == 2 and y.shape[1] == positions):
        each = f", or one for each position, so shape ({samples}, {positions})" if positions else ""
        raise ShardError(f"{where} has shape {y.shape}; one label a sample is needed, so shape ({samples},){each}")
    if len(y) != samples:
        raise ShardError(f"{where} holds {len(y)} labels for {samples} samples; there must be one label a sample")
    if y.dtype.kind == "U":
        return y
    if y.dtype.kind in "bi":
        return y.astype(np.int64)
    if y.dtype.kind == "u":
        return _integers(y, where)
    if y.dtype.kind == "f":
        return _integral(y, where)
    raise ShardError(f"{where} is of type {y.dtype}; labels are integers or text")


def _integers(y: Array, where: str) -> Array:
    if len(y) and int(y.max()) > np.iinfo(np.int64).max:
        raise ShardError(f"{where} holds the label {int(y.max())}, which does not fit into 64 bits with a sign; use text")
    return y.astype(np.int64)


def _integral(y: Array, where: str) -> Array:
    wrong = ~np.isfinite(y) | (y != np.trunc(y)) | (np.abs(y) >= 2.0**63)
    if wrong.any():
        first = y[wrong][0]
        raise ShardError(
            f"{where} holds {int(wrong.sum())} labels that are no integers, the first is {first}; use integers or text, "
            'or say that these are numbers to predict: "task": "regression" in meta.json, --task regression'
        )
    return y.astype(np.int64)


def distinct(*parts: Array) -> list[Label]:
    """The labels that occur in `parts`, as plain Python values, sorted."""
    return sorted({label for part in parts for label in np.unique(part).tolist()}, key=order)


def shown(labels: Iterable[Label]) -> str:
    """The first labels, for a message, and the number of the others."""
    every = [repr(label) for label in labels]
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return ", ".join(every[:_SHOWN]) + more


def to_indices(y: Array, classes: Sequence[Label], where: str) -> npt.NDArray[np.int64]:
    """Labels (N,) or (N, T) as indices of `classes`. Errors: UndeclaredLabels that names those which are not in it."""
    index = {label: position for position, label in enumerate(classes)}
    values, inverse = np.unique(y, return_inverse=True)
    known: list[Any] = values.tolist()
    strange = [label for label in known if label not in index]
    if strange:
        count = int(np.isin(y, np.asarray(strange, dtype=y.dtype)).sum())
        raise UndeclaredLabels(
            f"{where} holds {count} {'samples' if y.ndim == 1 else 'positions'} with labels outside the declared classes: "
            f"{shown(strange)}; "
            f"the classes are {shown(classes)}. Remove those samples, or declare all classes in meta.json before round 1"
        )
    table = np.array([index[label] for label in known], dtype=np.int64)
    return np.asarray(table[inverse.reshape(y.shape)], dtype=np.int64)
