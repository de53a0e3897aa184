"""Shards whose test parts are cut from the training parts, so that settings can be chosen without a look at the test parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from attune.common.errors import ShardError
from attune.fedclient.data.holdout import FEWEST_SAMPLES, Indices, hold_out, strata
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.data.shard import Shard

SHARE = 0.25  # share of each device's training samples that is used for validation


def validation_places(shard: Shard, share: float, seed: int) -> tuple[Indices, Indices]:
    """Return which training samples stay for training, and which are used for validation, both ascending."""
    return hold_out(strata(shard.train_y, shard.task), share, seed, shard.kind, shard.groups)


def validation_shard(shard: Shard, share: float, seed: int) -> Shard:
    """Return a shard with a share of the training part as its test part. It has the same classes, and no real test sample."""
    train, held = validation_places(shard, share, seed)
    return replace(
        shard,
        train_x=shard.train_x[train],
        train_y=shard.train_y[train],
        test_x=shard.train_x[held],
        test_y=shard.train_y[held],
        groups=None if shard.groups is None else shard.groups[train],
        test_groups=None if shard.groups is None else shard.groups[held],
        declared_classes=shard.labels,
        warnings=(),
        held_hashes=(),
    )


def validation_members(members: Mapping[str, LazyShard], seed: int, share: float = SHARE) -> dict[str, LazyShard]:
    """Return for each device the shard that `validation_shard` cuts; samples are read when they are needed.

    Raises:
        ShardError: No device has enough training samples.
    """
    cut = {}
    for name, member in members.items():
        load = partial(_load, member.load, share, seed)
        shard = load()
        cut[name] = LazyShard(member.name, shard.profile(), (), load, shard.read, shard.digest)
    if not any(member.profile.test_samples for member in cut.values()):
        raise ShardError(
            f"no device has {FEWEST_SAMPLES} training samples, of which a part could be cut to choose settings: "
            "leave --grid out"
        )
    return cut


def _load(load: Callable[[], Shard], share: float, seed: int) -> Shard:
    return validation_shard(load(), share, seed)
