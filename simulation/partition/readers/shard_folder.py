"""A folder with train.npz [, test.npz, meta.json]: a shard, cut once more."""

from __future__ import annotations

from pathlib import Path

from attune.common.errors import SettingError
from attune.fedclient.data.shard import load_shard
from attune.fedclient.read_options import ReadOptions
from attune.simulation.partition.samples import Dataset


def recognises(path: Path) -> bool:
    return path.is_dir() and (path / "train.npz").is_file()


def read(path: Path, options: ReadOptions) -> Dataset:
    """Errors: as `load_shard`; SettingError for options, because meta.json has them."""
    if options != ReadOptions(apart=options.apart):
        raise SettingError(
            f"{path} is a shard, and its meta.json declares all that is needed; leave --label, --shape and --missing out"
        )
    shard = load_shard(path)
    parts = (shard.train_x, shard.train_y, shard.test_x, shard.test_y)
    return Dataset(
        shard.name,
        shard.kind,
        *parts,
        classes=shard.profile().labels,
        vocabulary=shard.vocabulary,
        standardise=shard.standardise,
        columns=tuple(shard.column_names),
    )
