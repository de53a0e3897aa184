"""A device's data: what is said about it, and how to get at the samples when they are needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from attune.common.plan import Profile
from attune.fedclient.data.shard import Shard, load_shard


@dataclass(frozen=True)
class Source:
    """`load` gives the same samples every time; whether they stay in memory in between is its business."""

    name: str
    profile: Profile
    warnings: tuple[str, ...]
    load: Callable[[], Shard]


def held(shard: Shard) -> Source:
    """The samples stay in memory: for a device that has the process to itself."""
    return Source(shard.name, shard.profile(), shard.warnings, lambda: shard)


def on_disk(path: Path) -> Source:
    """The samples are read once to be checked, and again for every use. Errors: those of load_shard."""
    shard = load_shard(path)
    return Source(shard.name, shard.profile(), shard.warnings, partial(load_shard, path))
