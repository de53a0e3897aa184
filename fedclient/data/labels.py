"""Labels of a shard: classes as integers or text with their indices, and the numbers of other tasks.

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


def sort_key(label: Label) -> tuple[bool, Label]:
    """Return a key that sorts mixed integers and strings, integers first."""
    return isinstance(label, str), label


def plain_labels(y: Array, samples: int, where: str, positions: int = 0) -> Array:
    """Return the labels as int64 or text, of shape (N,), or (N, T) if every position has a label.

    Booleans and floats without a fraction become integers.

    Args:
        y: The labels as read.
        samples: N, the number of samples that need a label.
        where: Name of the array in messages.
        positions: T, if labels for positions are allowed; 0 if they are not.

    Raises:
        ShardError: The shape is neither (N,) nor (N, T), or the labels are neither integers nor text.
    """
    if y.ndim != 1 and not (positions and y.ndim == 2 and y.shape[1] == positions):
        or_positions = f", or one for each position, so shape ({samples}, {positions})" if positions else ""
        raise ShardError(f"{where} has shape {y.shape}; one label a sample is needed, so shape ({samples},){or_positions}")
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
    """Return the labels that occur in `parts`, as Python values, sorted."""
    return sorted({label for part in parts for label in np.unique(part).tolist()}, key=sort_key)


def _first_few(labels: Iterable[Label]) -> str:
    """Return the first labels and the number of the others, for a message."""
    every = [repr(label) for label in labels]
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return ", ".join(every[:_SHOWN]) + more


def to_indices(y: Array, classes: Sequence[Label], where: str) -> npt.NDArray[np.int64]:
    """Return labels, (N,) or (N, T), as indices of `classes`, in the same shape.

    Raises:
        UndeclaredLabels: A label is not in `classes`. The message names these labels, and calls the array `where`.
    """
    index = {label: position for position, label in enumerate(classes)}
    values, inverse = np.unique(y, return_inverse=True)
    known: list[Any] = values.tolist()
    strange = [label for label in known if label not in index]
    if strange:
        count = int(np.isin(y, np.asarray(strange, dtype=y.dtype)).sum())
        raise UndeclaredLabels(
            f"{where} holds {count} {'samples' if y.ndim == 1 else 'positions'} with labels outside the declared classes: "
            f"{_first_few(strange)}; "
            f"the classes are {_first_few(classes)}. Remove those samples, or declare all classes in meta.json before round 1"
        )
    table = np.array([index[label] for label in known], dtype=np.int64)
    return np.asarray(table[inverse.reshape(y.shape)], dtype=np.int64)


MAX_OUTPUTS = 1 << 12
LARGEST = 1e100  # its square is finite


def target_numbers(y: Array, samples: int, where: str, task: TaskName) -> Array:
    """Return the numbers of a task without classes, (N, K) float64.

    Args:
        y: (N,) or (N, K) for regression; (N, K) with 0 and 1 for several labels.
        samples: N, the number of samples that need a row.
        where: Name of the array in messages.
        task: "regression" or "multilabel".

    Raises:
        ShardError: Shape, type or values do not fit the task.
    """
    ranks = (1, 2) if task == "regression" else (2,)
    if y.ndim not in ranks or y.dtype.kind not in "biuf":
        raise ShardError(f"{where} has shape {y.shape} and type {y.dtype}; the task {task} needs {TASKS[task].needs}")
    if len(y) != samples:
        raise ShardError(f"{where} holds {len(y)} rows for {samples} samples; there must be one for each")
    numbers = y.reshape(len(y), -1).astype(np.float64) if y.ndim == 1 else y.astype(np.float64)
    if not 1 <= numbers.shape[1] <= MAX_OUTPUTS:
        raise ShardError(f"{where} has {numbers.shape[1]} columns; 1 to {MAX_OUTPUTS} {TASKS[task].outputs} are possible")
    wrong = ~np.isin(numbers, (0, 1)) if task == "multilabel" else ~(np.abs(numbers) <= LARGEST)
    if wrong.any():
        at = np.argwhere(wrong)[0]
        remedy = "each must be 0 or 1" if task == "multilabel" else "fill them in or leave those samples out"
        raise ShardError(
            f"{where} holds {int(wrong.sum())} values that the task {task} cannot use, the first is {numbers[tuple(at)]} in "
            f"sample {at[0] + 1}; {remedy}"
        )
    return numbers


def target_names(declared: list[int | str] | None, count: int, where: str) -> list[int | str]:
    """Return the name of each column of y: the declared ones, or numbers from 0.

    Raises:
        ShardError: The number of declared names is not `count`.
    """
    if declared is not None and len(declared) != count:
        raise ShardError(f"`classes` of {where} names {len(declared)} columns of y, but y has {count}; name each, in order")
    return declared or list(range(count))
