"""Comparison of a table's units with the usual ranges of a schema. The device computes it, and tells a word for each column."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from attune.common.schema import Schema
from attune.fedclient.data.table import DataTable
from attune.fedclient.data.table_encoder import TableEncoder

Verdict = Literal["fits", "factor 10", "factor 2.54", "differs"]
_FEWEST = 10  # values; with fewer nothing is said
_FITTING = 0.9  # share of values that must lie in the range
_MARGIN = 0.25  # of the range's width, added at both ends
_FACTORS: dict[Verdict, tuple[float, ...]] = {"factor 10": (10, 100, 1000), "factor 2.54": (2.54,)}


def unit_verdicts(table: DataTable, schema: Schema) -> dict[str, Verdict]:
    """Return a verdict for each column that has a range in the schema and enough values in the table.

    `factor 10` stands for 10, 100 and 1000, and for their inverse; so does `factor 2.54` for both directions.
    """
    x = TableEncoder(schema).encode(table).x
    verdicts: dict[str, Verdict] = {}
    for at, feature in enumerate(schema.features()):
        column = schema.columns[feature.column]
        values = x[~np.isnan(x[:, at]), at].astype(np.float64)
        if feature.role == "number" and column.range is not None and len(values) >= _FEWEST:
            verdicts[feature.column] = verdict_of(values, column.range)
    return verdicts


def verdict_of(values: npt.NDArray[np.float64], usual: tuple[float, float]) -> Verdict:
    """Return whether values, (N,), lie in the usual range, or would if a factor of a common mistake were divided out."""
    if _fits(values, usual):
        return "fits"
    for verdict, factors in _FACTORS.items():
        if any(_fits(values * factor, usual) or _fits(values / factor, usual) for factor in factors):
            return verdict
    return "differs"


def _fits(values: npt.NDArray[np.float64], usual: tuple[float, float]) -> bool:
    """Return whether most values lie in the range with its margin, and the median in the range itself."""
    low, high = usual
    margin = _MARGIN * (high - low)
    inside = np.mean((values >= low - margin) & (values <= high + margin))
    return bool(inside >= _FITTING and low <= np.median(values) <= high)
