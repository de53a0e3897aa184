"""A device's data: its profile at once, its samples when they are needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from typing_extensions import Self

from attune.common.plan import Profile
from attune.fedclient.data.shard import Shard, load_shard
from attune.fedclient.read_options import PLAIN, ReadOptions


@dataclass(frozen=True)
class LazyShard:
    """`load` gives the same samples every time. Whether they stay in memory between two calls is its own business.

    It can be sent to another process of this machine.
    """

    name: str
    profile: Profile
    warnings: tuple[str, ...]
    load: Callable[[], Shard]

    @classmethod
    def held(cls, shard: Shard) -> Self:
        """The samples stay in memory: for a device that has the process to itself."""
        return cls(shard.name, shard.profile(), shard.warnings, partial(_held, shard))

    @classmethod
    def on_disk(cls, path: Path, options: ReadOptions = PLAIN) -> Self:
        """The samples are read once to be checked, and again for every use. Errors: those of load_shard."""
        shard = load_shard(path, options=options)
        return cls(shard.name, shard.profile(), shard.warnings, partial(load_shard, path, options=options))


def _held(shard: Shard) -> Shard:
    return shard
