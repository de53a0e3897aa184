"""y of tasks other than classes: numbers to predict, or labels that are there or not.

N samples, K targets or labels.
"""

from __future__ import annotations

import numpy as np

from attune.common.errors import ShardError
from attune.common.task import TASKS, TaskName
from attune.fedclient.data.arrays import Array

MAX_OUTPUTS = 1 << 12
LARGEST = 1e100  # squares of it are finite


def numbers(y: Array, samples: int, where: str, task: TaskName) -> Array:
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


def names(declared: list[int | str] | None, count: int, where: str) -> list[int | str]:
    """Of each column of y: as declared, else its number. Errors: ShardError for another count of names."""
    if declared is not None and len(declared) != count:
        raise ShardError(f"`classes` of {where} names {len(declared)} columns of y, and y has {count}; name each, in order")
    return declared or list(range(count))
