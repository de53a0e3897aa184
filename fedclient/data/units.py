"""Comparison of a table's units with the usual ranges of a schema. The device computes it, and tells a word for each column.

N samples, F features.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from attune.common.schema import Schema, UnitVerdict
from attune.fedclient.data.arrays import Array
from attune.fedclient.data.shard import Shard
from attune.fedclient.data.table_encoder import with_gaps

_FEWEST = 10  # values; with fewer nothing is said
_FITTING = 0.9  # share of values that must lie in the range
_MARGIN = 0.25  # of the range's width, added at both ends
_FACTORS: dict[UnitVerdict, tuple[float, ...]] = {"factor 10": (10, 100, 1000), "factor 2.54": (2.54,)}


def units_of_shard(shard: Shard) -> dict[str, UnitVerdict]:
    """Return the verdicts on a shard that was made by a schema. What was filled in does not count, where features tell it."""
    if shard.schema is None:
        return {}
    x = np.concatenate([shard.train_x, shard.test_x])
    return unit_verdicts(with_gaps(x, shard.schema), shard.schema)


def unit_verdicts(x: Array, schema: Schema) -> dict[str, UnitVerdict]:
    """Return a verdict for each column that has a range in the schema and enough values in the features, (N, F).

    `factor 10` stands for 10, 100 and 1000, and for their inverse; so does `factor 2.54` for both directions.
    """
    verdicts: dict[str, UnitVerdict] = {}
    for at, feature in enumerate(schema.features()):
        usual = schema.columns[feature.column].range
        values = x[~np.isnan(x[:, at]), at].astype(np.float64)
        if feature.role == "number" and usual is not None and len(values) >= _FEWEST:
            verdicts[feature.column] = verdict_of(values, usual)
    return verdicts


def verdict_of(values: npt.NDArray[np.float64], usual: tuple[float, float]) -> UnitVerdict:
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
