"""Missing values of a table's features: they are refused, or the median of a column stands in their place.

N samples, F features.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from attune.common.errors import ShardError
from attune.common.plan import Kind
from attune.fedclient.data.arrays import Array
from attune.fedclient.data.cells import numbers_in, words_of

_SHOWN = 8


def medians(
    train_x: Array, columns: Sequence[str], where: str, empty_fill: npt.NDArray[np.float64] | None = None
) -> npt.NDArray[np.float64]:
    """Return the median of each column over the training part, (F,). A model keeps them for the samples that it predicts.

    Args:
        train_x: (N, F), with NaN for missing values.
        columns: Names of the F columns; empty if they are not known.
        where: Name of the data in messages.
        empty_fill: What stands in a column without any value, (F,); None: such a column is refused.

    Raises:
        ShardError: A column has no values at all.
    """
    empty = np.flatnonzero(np.isnan(train_x).all(axis=0))
    if empty_fill is not None:
        train_x = train_x.astype(np.float64)
        train_x[:, empty] = empty_fill[empty]
    elif len(empty):
        listed = ", ".join(repr(columns[at]) if columns else str(at) for at in empty[:_SHOWN])
        raise ShardError(
            f"{where} holds no value at all to train on in the columns {listed}, so they have no median; leave them out"
        )
    return np.nanmedian(train_x, axis=0).astype(np.float64)


def filled(x: Array, fill: npt.NDArray[np.float64]) -> Array:
    """Return `x`, (N, F), with the values of `fill`, (F,), in place of NaN."""
    return np.where(np.isnan(x), fill, x).astype(x.dtype) if x.dtype.kind == "f" else x


def missing_numbers(kind: Kind, words: Sequence[str]) -> npt.NDArray[np.float64]:
    """Return the numbers among the words for missing values, (K,); none for other kinds than tables and series."""
    return np.array(numbers_in(words_of(words)) if kind in ("tabular", "series") else [], dtype=np.float64)


def with_nan(x: Array, kind: Kind, words: Sequence[str]) -> Array:
    """Return the numbers of a table or series, (N, ...), with NaN for those among the words for missing values.

    They are numbers as the user has them: features that a schema has made of cells are none. Other kinds stay as they are.
    """
    numbers = missing_numbers(kind, words)
    with np.errstate(over="ignore"):  # a number that the type cannot hold is none of its values
        numbers = numbers.astype(x.dtype) if x.dtype.kind == "f" else numbers
    missing = np.isin(x, numbers[np.isfinite(numbers)])
    return np.where(missing, np.nan, x) if missing.any() else x


def check_none(x: Array, columns: Sequence[str], where: str) -> None:
    """Check that no value is missing.

    Raises:
        ShardError: Some are. The message names the columns, and what to do.
    """
    count_F = np.isnan(x).sum(axis=0)
    if count_F.any():
        listed = ", ".join(f"{columns[at]} ({int(count_F[at])})" for at in np.flatnonzero(count_F)[:_SHOWN])
        raise ShardError(
            f"{where} lacks values in the columns (how many): {listed}; --missing median puts a column's median there"
        )
