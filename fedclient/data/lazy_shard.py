"""A device's data: its profile at once, its samples when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import Self

from attune.common.errors import ShardError
from attune.common.plan import Profile
from attune.fedclient.data import kinds
from attune.fedclient.data.arrays import Array
from attune.fedclient.data.meta import Meta
from attune.fedclient.data.shard import Shard, load_shard, make_shard
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


FORMS = (
    "a folder or a file, arrays (x, y) or (train_x, train_y, test_x, test_y), a torch Dataset, or two of them: (train, test)"
)


def shard_of(name: str, given: Any, table: ReadOptions = PLAIN) -> LazyShard:
    """The data of the device `name`. table: how a table is read, and the task. Errors: ShardError, and those of load_shard."""
    if isinstance(given, (str, Path)):
        return LazyShard.on_disk(Path(given), table)
    train, test = _parts(name, given)
    return LazyShard.held(make_shard(Path(name), name, train, test, Meta(task=table.task)))


def _parts(name: str, given: Any) -> tuple[tuple[Array, Array], tuple[Array, Array] | None]:
    if _is_dataset(given):
        return _stacked(name, given), None
    if isinstance(given, Sequence) and len(given) == 2 and all(map(_is_dataset, given)):
        return _stacked(name, given[0]), _stacked(name, given[1])
    if isinstance(given, Sequence) and len(given) in (2, 4):
        arrays = [np.asarray(each) for each in given]
        return (arrays[0], arrays[1]), (arrays[2], arrays[3]) if len(arrays) == 4 else None
    raise ShardError(f"the data of {name} are a {type(given).__name__}; give {FORMS}")


def _is_dataset(given: Any) -> bool:
    """Arrays and tensors have a shape, lists of arrays no items that are pairs."""
    known = hasattr(given, "__getitem__") and hasattr(given, "__len__") and not hasattr(given, "shape")
    return known and not isinstance(given, (Sequence, Mapping))


def _stacked(name: str, dataset: Any) -> tuple[Array, Array]:
    """All samples of a torch data set. Images are (C, H, W) there unless they cannot be, and (H, W, C) in a shard."""
    pairs = [dataset[index] for index in range(len(dataset))]
    if not pairs or not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in pairs):
        raise ShardError(f"the data set of {name} must hold pairs (x, y), at least one")
    x, y = (np.stack([np.asarray(pair[side]) for pair in pairs]) for side in (0, 1))
    first = x.shape[-1] not in kinds.CHANNELS or x.shape[1:2] in [(channels,) for channels in kinds.CHANNELS]
    return (kinds.channels_last(x) if first else x), y
