"""Reader of a shard, a folder with train.npz and perhaps test.npz and meta.json, which is cut once more."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from attune.common.errors import SettingError
from attune.fedclient.data.shard import Shard, load_shard
from attune.fedclient.read_options import ReadOptions
from attune.simulation.partition.samples import Dataset, Positions

GROUP = "group"


def recognises(path: Path) -> bool:
    """Return whether this reader can read the path, by names or a first line."""
    return path.is_dir() and (path / "train.npz").is_file()


def read(path: Path, options: ReadOptions) -> Dataset:
    """Read the shard.

    Raises:
        SettingError: Options were given that meta.json declares.
        ShardError: As in `load_shard`.
    """
    if options != ReadOptions(apart=options.apart):
        raise SettingError(
            f"{path} is a shard, and its meta.json declares all that is needed: leave --label, --shape and --missing* out"
        )
    shard = load_shard(path)
    parts = (shard.train_x, shard.train_y, shard.test_x, shard.test_y)
    groups = _groups(shard)
    return Dataset(
        shard.name,
        shard.kind,
        *parts,
        classes=shard.profile().labels,
        vocabulary=shard.vocabulary,
        more={} if groups is None else {GROUP: groups},
        group="" if groups is None else GROUP,
        standardise=shard.standardise,
        columns=tuple(shard.column_names),
        findings=shard.warnings,
    )


def _groups(shard: Shard) -> Positions | None:
    """Return the group of each training sample, then of each test sample, as numbers from 0 on; None without groups."""
    if shard.groups is None:
        return None
    group_n = np.unique(shard.groups, return_inverse=True)[1]
    if shard.test_groups is None:  # each test sample is its own
        return np.concatenate([group_n, len(group_n) + np.arange(len(shard.test_y))])
    return np.unique(np.concatenate([shard.groups, shard.test_groups]), return_inverse=True)[1]
