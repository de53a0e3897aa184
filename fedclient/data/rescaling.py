"""Scaling of a table's features by its schema: by the ranges of its columns, and of numbers alone. F features."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from attune.common.plan import Plan
from attune.fedclient.data.shard import Shard
from attune.fedclient.data.standardiser import UNSEEN, Standardiser
from attune.fedclient.data.table_encoder import TableEncoder

Rescaling = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]


def to_ranges(shard: Shard, plan: Plan, scaling: Standardiser | None) -> Rescaling | None:
    """Return factor and shift, (F,) each, from features in the device's scale to that of the schema's ranges.

    None: the plan does not scale by ranges. A feature that stands for a value has the same scale at every site.
    """
    if shard.schema is None or not plan.scaled_by_ranges:
        return None
    encoder = TableEncoder(shard.schema)
    (mean_F, std_F), is_scaled = encoder.public_scale, encoder.is_scaled
    own_mean_F, own_std_F = (0.0, 1.0) if scaling is None else (scaling.mean, scaling.std)
    return np.where(is_scaled, own_std_F / std_F, 1.0), np.where(is_scaled, (own_mean_F - mean_F) / std_F, 0.0)


def unscaled(shard: Shard, scaling: Standardiser) -> Standardiser:
    """Return the scaling for numbers, dates and yes/no alone. Other features stand for values, the same at every site."""
    if shard.schema is None:
        return scaling
    is_scaled = TableEncoder(shard.schema).is_scaled
    return Standardiser(np.where(is_scaled, scaling.mean, 0.0), np.where(is_scaled, scaling.std, 1.0))


def given_scaling(shard: Shard, plan: Plan) -> Standardiser | None:
    """Return the scaling of a model that is evaluated without training; None: it has none of its own.

    A feature that its training never saw stays as it was there. Missing values are those of this site.
    """
    if not plan.given or plan.scale is None:
        return None
    scaling = Standardiser(np.array(plan.scale.mean), np.array(plan.scale.std))
    numbers, unseen_F = unscaled(shard, scaling), scaling.std >= UNSEEN
    mean_F, std_F = (np.where(unseen_F, *pair) for pair in ((scaling.mean, numbers.mean), (scaling.std, numbers.std)))
    return Standardiser(mean_F, std_F, shard.fill, shard.missing_words)
