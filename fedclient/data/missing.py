"""Missing values of a table, filled in by what the training part has."""

from __future__ import annotations

import numpy as np

from attune.common.errors import ShardError
from attune.fedclient.data.arrays import Array


def filled(train_x: Array, test_x: Array, name: str) -> tuple[Array, Array]:
    """NaN replaced by the median of its column over the training part. Errors: ShardError for a column of nothing else."""
    if train_x.dtype.kind != "f":
        return train_x, test_x
    if np.isnan(train_x).all(axis=0).any():
        raise ShardError(f"some column of {name} holds no value at all, so it has no median; leave it out")
    median = np.nanmedian(train_x, axis=0)
    return tuple(np.where(np.isnan(x), median, x).astype(x.dtype) for x in (train_x, test_x))  # type: ignore[return-value]
