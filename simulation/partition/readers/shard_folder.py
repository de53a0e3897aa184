"""Reader of a shard, a folder with train.npz and perhaps test.npz and meta.json, which is cut once more."""

from __future__ import annotations

from pathlib import Path

from attune.common.errors import SettingError
from attune.fedclient.data.shard import load_shard
from attune.fedclient.read_options import ReadOptions
from attune.simulation.partition.samples import Dataset


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
    return Dataset(
        shard.name,
        shard.kind,
        *parts,
        classes=shard.profile().labels,
        vocabulary=shard.vocabulary,
        standardise=shard.standardise,
        columns=tuple(shard.column_names),
    )
