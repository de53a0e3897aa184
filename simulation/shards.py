"""Shards of a simulation's devices, from a pattern, folders, arrays or torch data sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attune.common.errors import ShardError
from attune.common.identity.names import check_name
from attune.fedclient import shards
from attune.fedclient.data.lazy_shard import LazyShard, shard_of
from attune.fedclient.read_options import PLAIN, ReadOptions

Shards = str | Path | Sequence[str | Path] | Mapping[str, Any]


def shards_by_name(given: Shards, table: ReadOptions = PLAIN) -> dict[str, LazyShard]:
    """Return the shard of each device, by the device's name.

    Args:
        given: As in `attune.simulate`.
        table: The task, and how tables are read.

    Raises:
        ShardError: There are no shards, or one cannot be read or used.
        SettingError: A device cannot have this name, or a column does not exist.
    """
    if isinstance(given, Mapping):
        by_name = {check_name(name): shard_of(name, value, table) for name, value in given.items()}
    else:
        paths = shards.expand([str(path) for path in ([given] if isinstance(given, (str, Path)) else given)])
        by_name = {name: LazyShard.on_disk(path, table) for name, path in zip(shards.labels(paths), paths, strict=True)}
    if not by_name:
        raise ShardError("there are no shards: a federation needs the data of at least one device")
    return by_name
