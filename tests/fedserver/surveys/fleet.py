"""Figures that a server shows of shards, by the devices' own code: clear, masked and noised."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from attune.common.exchange.messages import FixedSurvivors
from attune.common.secure.masked_sums import added, packed
from attune.common.site_statistics import MaskedLayout, NoisyLayout
from attune.fedclient.data.meta import Meta
from attune.fedclient.data.shard import Shard, make_shard
from attune.fedclient.data.site_sums import site_sketches, site_sums, slots_of
from attune.fedclient.work.private.ledger import PrivacyLedger
from attune.fedclient.work.private.private_learning import released
from attune.fedserver.surveys.answers import (
    KeptSum,
    SumReader,
    centres_of,
    check_sketches,
    check_sums,
    clear_fleet,
    noisy_fleet,
)
from attune.fedserver.surveys.fleet_statistics import FleetStatistics
from attune.fedserver.surveys.layouts import survival_columns

Shards = Mapping[str, Shard]


def gappy_shard(name: str, x: Any, y: Any, **meta: Any) -> Shard:
    """Return a table whose gaps stay."""
    return make_shard(Path(name), name, (x, y), None, Meta(**meta), keep_gaps=True)


def clear(shards: Shards) -> FleetStatistics:
    """Return the statistics of two passes."""
    sums, profiles = ({name: of(shard) for name, shard in shards.items()} for of in (site_sums, Shard.profile))
    pair = survival_columns(profiles.values())
    centres = centres_of(sums, survival=pair)
    sketches = {name: site_sketches(shard, centres) for name, shard in shards.items()}
    for name in shards:
        check_sums(sums[name], profiles[name])
        check_sketches(sketches[name], sums[name], centres, pair)
    return clear_fleet(sums, sketches, profiles, {})


def masked(shards: Shards, layout: MaskedLayout) -> SumReader:
    """Return the reader of one sum."""
    number, names = bytes(layout.size), tuple(shards)
    for shard in shards.values():
        number = added(number, packed(layout, slots_of(shard, layout)))
    return SumReader(KeptSum("1", layout, FixedSurvivors(3, (), names, names), number, is_masked=False))


def noised(shards: Shards, layout: NoisyLayout) -> FleetStatistics:
    """Return the statistics of one release of each device, from a ledger of its own."""
    pytest.importorskip("dp_accounting")
    ledgers = {name: PrivacyLedger.in_memory(bytes([at]) * 32) for at, name in enumerate(shards)}
    return noisy_fleet(layout, {name: released(shard, layout, ledgers[name], None) for name, shard in shards.items()}, {}, {})
