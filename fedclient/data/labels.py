"""The y of a shard: labels as plain ints or text with their class indices, and the targets of other tasks.

N samples, T positions, K targets or labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from attune.common.errors import ShardError, UndeclaredLabels
from attune.common.plan import Label
from attune.common.task import TASKS, TaskName
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


MAX_OUTPUTS = 1 << 12
LARGEST = 1e100  # squares of it are finite


def target_numbers(y: Array, samples: int, where: str, task: TaskName) -> Array:
    """(N, K) float64 of y (N,) or (N, K); of labels only 0 and 1, and (N, K). Errors: ShardError."""
    ranks = (1, 2) if task == "regression" else (2,)
    if y.ndim not in ranks or y.dtype.kind not in "biuf":
        raise ShardError(f"{where} has shape {y.shape} and type {y.dtype}; the task {task} needs {TASKS[task].needs}")
    if len(y) != samples:
        raise ShardError(f"{where} holds {len(y)} rows for {samples} samples; there must be one for each")
    found = y.reshape(len(y), -1).astype(np.float64) if y.ndim == 1 else y.astype(np.float64)
    if not 1 <= found.shape[1] <= MAX_OUTPUTS:
        raise ShardError(f"{where} has {found.shape[1]} columns; 1 to {MAX_OUTPUTS} {TASKS[task].outputs} are possible")
    wrong = ~np.isin(found, (0, 1)) if task == "multilabel" else ~(np.abs(found) <= LARGEST)
    if wrong.any():
        at = np.argwhere(wrong)[0]
        remedy = "each must be 0 or 1" if task == "multilabel" else "fill them in or leave those samples out"
        raise ShardError(
            f"{where} holds {int(wrong.sum())} values that the task {task} cannot use, the first is {found[tuple(at)]} in "
            f"sample {at[0] + 1}; {remedy}"
        )
    return found


def target_names(declared: list[int | str] | None, count: int, where: str) -> list[int | str]:
    """Of each column of y: as declared, else its number. Errors: ShardError for another count of names."""
    if declared is not None and len(declared) != count:
        raise ShardError(f"`classes` of {where} names {len(declared)} columns of y, and y has {count}; name each, in order")
    return declared or list(range(count))
