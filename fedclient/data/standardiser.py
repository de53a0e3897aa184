"""Scaling of features by a mean and standard deviation, and the values in place of missing ones; a finished model keeps both.

Missing values of a table are refused, or the median of a column stands in their place. N samples, F features, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from attune.common.errors import ShapeMismatch, ShardError
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


UNSEEN = 1e30  # deviation of a feature of which training knows no value: beside it all values are alike


@dataclass(frozen=True)
class Standardiser:
    """Mean and standard deviation of each feature (tabular) or channel (series), and the scaling by them.

    Attributes:
        mean: (F,) or (C,).
        std: (F,) or (C,); 1 for a constant feature, and UNSEEN for one that was never seen.
        fill: Values in place of NaN, (F,): the medians of the training part. None: NaN is refused.
        missing_words: Words that mean a missing value, if the user named them.
    """

    mean: npt.NDArray[np.float64]
    std: npt.NDArray[np.float64]
    fill: npt.NDArray[np.float64] | None = None
    missing_words: tuple[str, ...] = ()

    @classmethod
    def fit(cls, x: Array) -> Standardiser:
        """Compute the statistics over all axes of `x` but the last, in float64.

        Columns are divided by their largest value first, so that no square overflows. Steps that are NaN in all columns do not
        count, and a column of nothing else keeps its scale.
        """
        columns = x.reshape(-1, x.shape[-1]).astype(np.float64)
        if np.isnan(columns.sum()):
            columns = np.nan_to_num(columns[~np.isnan(columns).all(axis=1)])
        scale = np.abs(columns).max(axis=0)
        scale[scale == 0] = 1.0
        columns /= scale
        std = columns.std(axis=0) * scale
        std[columns.max(axis=0) == columns.min(axis=0)] = 1.0
        std[std == 0] = 1.0
        return cls(columns.mean(axis=0) * scale, std)

    def apply(self, x: Array) -> npt.NDArray[np.float64]:
        """Return (x - mean) / std along the last axis.

        Raises:
            ShapeMismatch: The last axis has another size than `mean`.
        """
        if x.shape[-1] != len(self.mean):
            raise ShapeMismatch(f"the samples have {x.shape[-1]} features, this model's statistics are for {len(self.mean)}")
        return np.asarray((x.astype(np.float64) - self.mean) / self.std)

    def filled(self, x: Array) -> Array:
        """Return `x` with the fill values in place of NaN, if there are any."""
        return x if self.fill is None or x.shape[-1] != len(self.fill) else filled(x, self.fill)

    def to_dict(self) -> dict[str, list[float | str]]:
        saved: dict[str, list[float | str]] = {"mean": self.mean.tolist(), "std": self.std.tolist()}
        if self.fill is not None:
            saved["fill"] = self.fill.tolist()
        if self.missing_words:
            saved["missing_words"] = list(self.missing_words)
        return saved

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Standardiser:
        """Return the statistics that `to_dict` gave.

        Raises:
            ShardError: The saved values are damaged.
        """
        try:
            mean, std = (np.array(saved[key], dtype=np.float64) for key in ("mean", "std"))
            fill = np.array(saved["fill"], dtype=np.float64) if "fill" in saved else None
        except (KeyError, TypeError, ValueError) as error:
            raise ShardError(f"the saved feature statistics are damaged: {error!r}; fetch the model again") from None
        if mean.ndim != 1 or mean.shape != std.shape or not np.isfinite([mean, std]).all() or (std <= 0).any():
            raise ShardError("the saved feature statistics are damaged: they need a finite mean and a positive deviation each")
        if fill is not None and (fill.shape != mean.shape or not np.isfinite(fill).all()):
            raise ShardError("the saved fill values are damaged: each column needs a finite one")
        return cls(mean, std, fill, tuple(map(str, saved.get("missing_words", ()))))
