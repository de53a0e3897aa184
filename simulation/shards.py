"""What `shards` of a simulation may be: a pattern, folders, arrays or torch data sets; each becomes a device's data."""

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


def named(given: Shards, table: ReadOptions = PLAIN) -> dict[str, LazyShard]:
    """Each device's data, by the device's name. table: how tables are read.

    Errors: ShardError, SettingError for what cannot name a device, and for columns that are not there.
    """
    if isinstance(given, Mapping):
        found = {check_name(name): shard_of(name, value, table) for name, value in given.items()}
    else:
        paths = shards.expand([str(path) for path in ([given] if isinstance(given, (str, Path)) else given)])
        found = {name: LazyShard.on_disk(path, table) for name, path in zip(shards.labels(paths), paths, strict=True)}
    if not found:
        raise ShardError("there are no shards: a federation needs the data of at least one device")
    return found
