"""Carrier of a round on workers: partials there, `combine` here, `apply` there; the values come back to the server's vault.

Where workers reach the blobs themselves (S3), no tensor comes to the server (`store_round`). The bits are those of one process:
a parcel has whole blocks, and partials are combined in the order of the blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

from attune.common.exchange.transform import PartUpdate
from attune.common.methods.settings.aggregators import MeanSettings
from attune.common.wire.header import Manifest
from attune.fedserver.lab.aggregators.base import (
    Aggregator,
    Block,
    Blockwise,
    Carried,
    Put,
    ReportedTensors,
    Tensors,
    Unit,
    Vault,
    in_turn,
    manifest_in,
    written,
)
from attune.fedserver.lab.build import AggregatorSpec, Maker, made
from attune.fedserver.lab.cluster.parcels import PARCEL_BYTES, UnitBatch, columns_of, unit_batches
from attune.fedserver.lab.cluster.store_round import StoreRound, store_of
from attune.fedserver.lab.cluster.worker_pool import ClusterUnusable, PoolCall, WorkerPool
from attune.fedserver.lab.cluster.workers import PackedTensors, pack, pack_updates, unpack
from attune.fedserver.lab.vault import StateVault

CHEAP_RULES = ("none", "clip")  # a plain mean: the server adds a number for less than it costs to send it


def cluster_maker(pool: WorkerPool) -> Maker:
    """Make aggregators whose rounds the pool carries out, where that pays."""

    def make(spec: AggregatorSpec, vault: Vault) -> Aggregator:
        cheap = isinstance(spec.settings, MeanSettings) and spec.settings.robust in CHEAP_RULES
        return made(spec, vault, ClusterCarrier(pool, spec, sends=not cheap))

    return make


@dataclass
class _BatchInFlight:
    """A batch on its way.

    Attributes:
        columns: The cohort's columns of each parcel, if they stay in the cluster for `apply`; else empty.
        calls: Each parcel's call of `partial`, later that of `apply`; empty where `apply` is done here.
        combined: Combined values by unit; empty before `combine`.
    """

    batch: UnitBatch
    columns: list[Any]
    calls: list[PoolCall]
    combined: dict[str, Tensors]


@dataclass(frozen=True)
class _RoundOnWorkers:
    """One round of an aggregator."""

    pool: WorkerPool
    spec: AggregatorSpec
    aggregator: Blockwise
    updates: Sequence[PartUpdate]
    manifest: Manifest

    def begin(self, batch: UnitBatch) -> _BatchInFlight:
        """Send the columns of each parcel and ask for its partials."""
        columns = [self._share(columns_of(parcel, self.manifest)) for parcel in batch.parcels]
        calls = [
            self.pool.call("partial", self.spec, parcel, shared) for parcel, shared in zip(batch.parcels, columns, strict=True)
        ]
        # Of a unit with several parcels, the columns of a whole cohort would need too much of the cluster's memory.
        keep = len(columns) == 1 and not batch.units[0].applied_here
        return _BatchInFlight(batch, columns if keep else [], calls, {})

    def combine(self, flight: _BatchInFlight) -> _BatchInFlight:
        """Wait for the partials, combine them here, and ask for the next values."""
        partials: dict[Block, Tensors] = {}
        for parcel, call in zip(flight.batch.parcels, flight.calls, strict=True):
            partials.update(zip(parcel, map(unpack, call.result()), strict=True))
        combined = {
            unit.name: self.aggregator.combine(unit, [partials[block] for block in unit.blocks], self.updates)
            for unit in flight.batch.units
        }
        calls: list[PoolCall] = []
        for number, parcel in enumerate(flight.batch.parcels if not flight.batch.units[0].applied_here else ()):
            columns = flight.columns[number] if flight.columns else self._share(columns_of(parcel, self.manifest))
            calls.append(self.pool.call("apply", self.spec, parcel, [pack(combined[b.unit]) for b in parcel], columns))
        return _BatchInFlight(flight.batch, [], calls, combined)

    def finish(self, flight: _BatchInFlight) -> Iterator[Carried]:
        """Wait for the next values."""
        puts: dict[Block, Iterator[Put]] = {}
        for parcel, call in zip(flight.batch.parcels, flight.calls, strict=False):
            puts.update((block, _puts(applied)) for block, applied in zip(parcel, call.result(), strict=True))
        for unit in flight.batch.units:
            combined = flight.combined[unit.name]
            values = (puts[block] if puts else self.aggregator.apply(block, combined, self.updates) for block in unit.blocks)
            yield unit, combined, chain.from_iterable(values)

    def _share(self, columns: Manifest) -> Any:
        return self.pool.share(pack_updates(self.updates, columns))


def _puts(applied: dict[str, PackedTensors]) -> Iterator[Put]:
    """Yield a block's values, tensor after tensor."""
    values = {key: unpack(packed) for key, packed in applied.items()}
    for name in next(iter(values.values()), {}):
        yield from ((key, name, tensors[name]) for key, tensors in values.items())


class ClusterCarrier:
    """Implements aggregators.base.Carrier for one part. If the cluster is gone, the rest of a round is carried out here.

    Where workers do not reach the blobs, they are sent columns, unless `sends` is False: then the round is carried out here.
    Two parcels for each worker are under way at a time, or all parcels of one unit.
    """

    def __init__(self, pool: WorkerPool, spec: AggregatorSpec, parcel_bytes: int = PARCEL_BYTES, sends: bool = True) -> None:
        self._pool, self._spec, self._parcel_bytes, self._sends = pool, spec, parcel_bytes, sends

    def carry(self, aggregator: Blockwise, vault: Vault, updates: Sequence[PartUpdate]) -> ReportedTensors:
        if self._pool.usable and (blobs := store_of(vault, updates)) is not None:
            try:
                return StoreRound(
                    self._pool, self._spec, aggregator, cast(StateVault, vault), blobs, updates, self._parcel_bytes
                ).carry()
            except ClusterUnusable as reason:
                self._pool.give_up(reason)
        return written(aggregator, vault, updates, self._carried(aggregator, updates))

    def _carried(self, aggregator: Blockwise, updates: Sequence[PartUpdate]) -> Iterator[Carried]:
        units, done = aggregator.units(), 0
        if self._pool.usable and self._sends:
            try:
                for carried in self._on_workers(aggregator, units, updates):
                    done += 1
                    yield carried
            except ClusterUnusable as reason:
                self._pool.give_up(reason)
        yield from in_turn(aggregator, units[done:], updates)

    def _on_workers(self, aggregator: Blockwise, units: Sequence[Unit], updates: Sequence[PartUpdate]) -> Iterator[Carried]:
        round_ = _RoundOnWorkers(self._pool, self._spec, aggregator, updates, manifest_in(updates[0].tensors))
        begun: deque[_BatchInFlight] = deque()
        applied: deque[_BatchInFlight] = deque()
        ahead = len(self._pool.members)
        for batch in unit_batches(units, round_.manifest, self._parcel_bytes):
            begun.append(round_.begin(batch))
            if len(begun) > ahead:
                applied.append(round_.combine(begun.popleft()))
            if len(applied) > ahead:
                yield from round_.finish(applied.popleft())
        while begun:
            applied.append(round_.combine(begun.popleft()))
        while applied:
            yield from round_.finish(applied.popleft())
