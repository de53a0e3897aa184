"""Labels of a shard: classes as integers or text with their indices, and the numbers of other tasks.

N samples, T positions, K targets or labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from attune.common.classes import normal
from attune.common.errors import ShardError, UndeclaredLabels
from attune.common.plan import FEWEST_ROWS, RARE, Label
from attune.common.task import TASKS, TIME_AND_EVENT, TaskName
from attune.common.text import listed
from attune.fedclient.data.arrays import Array
from attune.fedclient.data.cells import REMEDY, WORDS, Words, exact_below, is_missing, labels_of, numbers_in

NO_LABEL = -1


def sort_key(label: Label) -> tuple[bool, Label]:
    """Return a key that sorts mixed integers and strings, integers first."""
    return isinstance(label, str), label


def is_rare(y: Array, labels: Sequence[Label]) -> bool | msgspec.UnsetType:
    """Return True if one of two classes has less than RARE of the samples y (N,), else, and of a few samples, unset."""
    if y.ndim != 1 or len(labels) != 2 or len(y) < FEWEST_ROWS:
        return msgspec.UNSET
    share = float((y == labels[0]).mean())
    return min(share, 1 - share) < RARE or msgspec.UNSET


def plain_labels(
    y: Array, samples: int, where: str, positions: tuple[int, ...] = (), words: Words = WORDS, known: Sequence[Label] = ()
) -> Array:
    """Return the labels as int64 or text, of shape (N,), or (N, T) or (N, H, W) if every position has a label.

    Booleans and floats without a fraction become integers. Text is in the Unicode form NFC, without surrounding space.

    Args:
        y: The labels as read.
        samples: N, the number of samples that need a label.
        where: Name of the array in messages.
        positions: (T,) or (H, W), if labels for positions are allowed; empty if they are not.
        words: Words that mean a missing label.
        known: Declared classes. A word among them is a class.

    Raises:
        ShardError: The shape is neither (N,) nor (N, *positions), labels are missing, or they are neither integers nor text.
    """
    if y.ndim != 1 and not (positions and y.shape[1:] == positions):
        every = "pixel" if len(positions) > 1 else "position"
        or_positions = f", or one for each {every}, so shape {(samples, *positions)}" if positions else ""
        raise ShardError(f"{where} has shape {y.shape}; one label a sample is needed, so shape ({samples},){or_positions}")
    if len(y) != samples:
        raise ShardError(f"{where} holds {len(y)} labels for {samples} samples; there must be one label a sample")
    if y.dtype.kind in "iuf":
        _check_numbers(y, numbers_in(words), where, known)
    if y.dtype.kind in "bi":
        return y.astype(np.int64)
    if y.dtype.kind == "u":
        return _integers(y, where)
    if y.dtype.kind == "f":
        return _integral(y, where)
    if y.dtype.kind in "USTO":
        return _text(y, where, words, known)
    raise ShardError(f"{where} is of type {y.dtype}; labels are integers or text")


def _check_numbers(y: Array, missing: Sequence[float], where: str, known: Sequence[Label] = ()) -> None:
    """Check that no label is a number that means a missing value.

    Raises:
        ShardError: Some are, and are no declared classes.
    """
    wrong = np.isin(y, [number for number in missing if number not in known])
    if wrong.any():
        raise ShardError(
            f"{where} holds {int(wrong.sum())} labels that mean a missing value, the first is {y[wrong][0]}; leave these "
            f"samples out. {REMEDY}"
        )


def _text(y: Array, where: str, words: Words, known: Sequence[Label]) -> Array:
    """Return labels that are text, bytes or Python objects. Text stays text: whether 1 is "1" is decided by the plan."""
    cells = y.reshape(-1).tolist()
    places = {str(label) for label in known}
    missing = [at for at, cell in enumerate(cells) if is_missing(cell, words) and (cell is None or str(cell) not in places)]
    if missing:
        raise ShardError(
            f"{where} holds {len(missing)} labels that mean a missing value, the first is {cells[missing[0]]!r} in sample "
            f"{missing[0] + 1}; leave these samples out, or declare it as a class in meta.json. {REMEDY}"
        )
    try:
        if y.dtype.kind == "O":
            return labels_of(cells).reshape(y.shape)
        return np.array([normal(cell.decode() if isinstance(cell, bytes) else str(cell)) for cell in cells]).reshape(y.shape)
    except ValueError as error:  # a UnicodeDecodeError is one
        raise ShardError(f"{where} holds a label that can be neither an integer nor text: {error.args[0]}") from None


def _integers(y: Array, where: str) -> Array:
    if len(y) and int(y.max()) > np.iinfo(np.int64).max:
        raise ShardError(f"{where} holds the label {int(y.max())}, which does not fit into 64 bits with a sign; use text")
    return y.astype(np.int64)


def _integral(y: Array, where: str) -> Array:
    limit, y = exact_below(y.dtype), y.astype(np.float64)
    if gaps := int(np.isnan(y).sum()):
        raise ShardError(f"{where} holds {gaps} labels that are no integers but missing values (nan); leave these samples out")
    wrong = ~np.isfinite(y) | (y != np.trunc(y)) | (np.abs(y) >= 2.0**63)
    if wrong.any():
        first = y[wrong][0]
        raise ShardError(
            f"{where} holds {int(wrong.sum())} labels that are no integers, the first is {first}; use integers or text, "
            'or say that these are numbers to predict: "task": "regression" in meta.json, --task regression'
        )
    if (np.abs(y) >= limit).any():
        raise ShardError(f"{where} holds floats from {limit} on as labels, whose last digits are lost; use integers or text")
    return y.astype(np.int64)


def distinct(*parts: Array) -> list[Label]:
    """Return the labels that occur in `parts`, as Python values, sorted."""
    return sorted({label for part in parts for label in np.unique(part).tolist()}, key=sort_key)


def _first_few(labels: Iterable[Label]) -> str:
    """Return the first labels and the number of the others, for a message."""
    return listed([repr(label) for label in labels])


def to_indices(y: Array, classes: Sequence[Label], where: str) -> npt.NDArray[np.int64]:
    """Return labels, (N, ...), as indices of `classes`, in the same shape. The label 1 is the class "1" if there is no 1.

    Raises:
        UndeclaredLabels: A label is not in `classes`. The message names these labels, and calls the array `where`.
    """
    as_text = {str(label): position for position, label in enumerate(classes)}
    index = {label: position for position, label in enumerate(classes)}
    values, inverse = np.unique(y, return_inverse=True)
    known: list[Any] = values.tolist()
    index |= {label: as_text[str(label)] for label in known if label not in index and str(label) in as_text}
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


def check_test_labels(train_y: Array, test_y: Array, where: str) -> None:
    """Check that no test sample has -1 instead of a class, as the test part of many public data sets has.

    Raises:
        ShardError: Some have, and the classes of the training part are all from 0 on.
    """
    known = distinct(train_y)
    if NO_LABEL in distinct(test_y) and all(isinstance(label, int) and label >= 0 for label in known):
        raise ShardError(
            f"{int((test_y == NO_LABEL).sum())} test samples of {where} have the label {NO_LABEL}, and no training sample has: "
            "it usually marks samples whose class is not known. Leave them out, or declare all `classes` in meta.json"
        )


MAX_OUTPUTS = 1 << 12
LARGEST = 1e100  # its square is finite


def target_numbers(
    y: Array, samples: int, where: str, task: TaskName, missing: Sequence[float] = (), names: Sequence[Label] | None = None
) -> Array:
    """Return the numbers of a task without classes, (N, K) float64.

    Args:
        y: (N,) or (N, K) for regression; (N, K) with 0 and 1 for several labels; (N, 2) with times and events for survival.
        samples: N, the number of samples that need a row.
        where: Name of the array in messages.
        task: "regression", "multilabel" or "survival".
        missing: Numbers that mean a missing value.
        names: Names of the columns of y, for messages; None: they have none.

    Raises:
        ShardError: Shape, type or values do not fit the task.
    """
    ranks = (1, 2) if task == "regression" else (2,)
    if y.ndim not in ranks or y.dtype.kind not in "biuf":
        raise ShardError(f"{where} has shape {y.shape} and type {y.dtype}; the task {task} needs {TASKS[task].needs}")
    if len(y) != samples:
        raise ShardError(f"{where} holds {len(y)} rows for {samples} samples; there must be one for each")
    _check_numbers(y, missing, where)
    numbers = y.reshape(len(y), -1).astype(np.float64) if y.ndim == 1 else y.astype(np.float64)
    if not 1 <= numbers.shape[1] <= MAX_OUTPUTS:
        raise ShardError(f"{where} has {numbers.shape[1]} columns; 1 to {MAX_OUTPUTS} {TASKS[task].outputs} are possible")
    if task == "survival":
        _check_survival(numbers, where, names or TIME_AND_EVENT)
        return numbers
    wrong = ~np.isin(numbers, (0, 1)) if task == "multilabel" else ~(np.abs(numbers) <= LARGEST)
    if wrong.any():
        at = np.argwhere(wrong)[0]
        remedy = "each must be 0 or 1" if task == "multilabel" else "fill them in or leave those samples out"
        raise ShardError(
            f"{where} holds {int(wrong.sum())} values that the task {task} cannot use, the first is {numbers[tuple(at)]} in "
            f"sample {at[0] + 1}; {remedy}"
        )
    return numbers


def any_numbers(y: Array, samples: int, where: str) -> npt.NDArray[np.float64]:
    """Return the y of a task of one's own, (N, ...) float64. Errors are those of `target_numbers`."""
    if not y.ndim or y.dtype.kind not in "biuf":
        raise ShardError(f"{where} has shape {y.shape} and type {y.dtype}; the task custom needs {TASKS['custom'].needs}")
    if len(y) != samples:
        raise ShardError(f"{where} holds {len(y)} rows for {samples} samples; there must be one for each")
    if wrong := int((~np.isfinite(y)).sum()):
        raise ShardError(f"{where} holds {wrong} values that are not finite; fill them in or leave those samples out")
    return y.astype(np.float64)


def _check_survival(numbers: npt.NDArray[np.float64], where: str, names: Sequence[Label]) -> None:
    """Check times and events, (N, 2).

    Raises:
        ShardError: There are other columns, a time is negative or not finite, or an event is neither 0 nor 1.
    """
    if numbers.shape[1] != len(TIME_AND_EVENT) or len(names) != len(TIME_AND_EVENT):
        raise ShardError(f"{where} has {numbers.shape[1]} columns; survival needs two: the time, then the event")
    time_N, event_N = numbers.T
    rules = (
        ("a time", time_N, (time_N >= 0) & (time_N <= LARGEST), "finite and at least 0"),
        ("an event", event_N, np.isin(event_N, (0, 1)), "0 (not seen until then) or 1 (it happened)"),
    )
    for name, (what, values, right, needs) in zip(names, rules, strict=True):
        if not right.all():
            first = int(np.flatnonzero(~right)[0])
            raise ShardError(
                f"{where}: {int((~right).sum())} values of the column {str(name)!r} cannot be {what}, which is {needs}; the "
                f"first is {values[first]:g} in sample {first + 1}. Correct them, or leave those samples out"
            )


def target_names(declared: list[Label] | None, count: int, where: str, task: TaskName) -> list[Label]:
    """Return the name of each column of y: the declared ones, or numbers from 0; in survival `time` and `event`.

    Raises:
        ShardError: The number of declared names is not `count`.
    """
    if declared is not None and len(declared) != count:
        raise ShardError(f"`classes` of {where} names {len(declared)} columns of y, but y has {count}; name each, in order")
    return declared or (list(TIME_AND_EVENT) if task == "survival" else list(range(count)))
