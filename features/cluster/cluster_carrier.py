"""Carriers of a round on workers: partials there, `combine` here, `apply` there; the values come back to the server's vault.

Where workers reach the blobs themselves (S3), no tensor comes to the server: it sends where everything lies, combines the
partials of units that were cut, and gives the finished blobs their names. Its commit makes them the state, as ever. The bits
are those of one process: a parcel has whole blocks, and partials are combined in the order of the blocks.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar, cast

from attune.common.exchange.transform import PartUpdate
from attune.common.methods.settings.aggregators import MeanSettings
from attune.common.wire.files import TensorFile
from attune.common.wire.header import Manifest
from attune.common.wire.tensors import Cast, TensorSource
from attune.features.cluster.worker_pool import ClusterUnusable, PoolCall, WorkerPool
from attune.features.cluster.workers import (
    PARCEL_BYTES,
    PackedTensors,
    UnitBatch,
    columns_of,
    pack,
    pack_updates,
    unit_batches,
    unpack,
)
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
from attune.fedserver.lab.checks import BoundedTensors, RebasedTensors
from attune.fedserver.lab.vault import StateVault
from attune.fedserver.ports.blobs import SharedBlobs, shared_blobs

T = TypeVar("T")
VIEWS = (Cast, BoundedTensors, RebasedTensors)  # views of files that can be sent to workers
KEYS_A_CALL = 64  # blobs that a call assembles, at most
CALLS_A_WORKER = 4  # calls of a step for each worker, if there is enough to do


def store_of(vault: Vault, updates: Sequence[PartUpdate]) -> SharedBlobs | None:
    """Return the store of a round whose workers need no bytes of the server; None if something lies in the server alone."""
    blobs = shared_blobs(vault.blobs) if isinstance(vault, StateVault) else None
    return blobs if blobs is not None and all(_is_elsewhere(update.tensors) for update in updates) else None


def _is_elsewhere(tensors: object) -> bool:
    """Return whether a worker can read these lazy tensors. Others may hold what must stay here, such as a noise secret."""
    if isinstance(tensors, TensorFile):
        return tensors.is_shared
    below = [value for value in vars(tensors).values() if isinstance(value, TensorSource)] if type(tensors) in VIEWS else []
    return bool(below) and all(map(_is_elsewhere, below))


class StoreRound:
    """One round of an aggregator.

    Args:
        pool: The workers.
        spec: The aggregator, for workers.
        aggregator: The same in the server.
        vault: Its vault.
        blobs: The store of updates and state.
        updates: The cohort's updates.
        parcel_bytes: Bytes of one client in a parcel.
    """

    def __init__(
        self,
        pool: WorkerPool,
        spec: AggregatorSpec,
        aggregator: Blockwise,
        vault: StateVault,
        blobs: SharedBlobs,
        updates: Sequence[PartUpdate],
        parcel_bytes: int,
    ) -> None:
        self._pool, self._aggregator, self._vault, self._blobs, self._updates = pool, aggregator, vault, blobs, updates
        self._batches = unit_batches(aggregator.units(), updates[0].source.manifest, parcel_bytes)
        self._access, self._spec = blobs.shared, spec
        self._token, self._pieces = secrets.token_hex(8), list[str]()

    def carry(self) -> ReportedTensors:
        """Write the next values, stage them in the vault, and return what is reported.

        Raises:
            NotFinite, Damaged, LedgerBusy: As in one process.
            ClusterUnusable: The cluster is gone, and nothing is staged.
        """
        from attune.features.cluster.workers import Piece, WrittenBlob

        kept = self._aggregator.kept(self._updates)
        try:
            pieces, reported = self._computed()
            shared: Any = self._pool.share(cast(list[Piece], pieces))
            calls = []
            for keys in self._shares_of(sorted(kept)):
                manifests = {key: kept[key] for key in keys}
                calls.append(self._pool.call("assemble", self._access, shared, manifests, self._token))
            blobs: list[WrittenBlob] = [written for of_call in results(calls) for written in of_call]
            for written in blobs:
                self._vault.adopt(self._blobs, written.key, written.digest, written.size, written.object, written.chunks)
            return reported
        finally:
            self._blobs.drop_objects(self._pieces)

    def _computed(self) -> tuple[list[Any], ReportedTensors]:
        """Compute all next values, and return the pieces that have them."""
        round_ = self._pool.share(self._round())
        whole = {
            number: self._pool.call("whole", self._access, round_, batch.units, self._piece())
            for number, batch in enumerate(self._batches)
            if len(batch.parcels) == 1
        }
        sums = {
            number: [self._pool.call("sums", self._access, round_, parcel) for parcel in batch.parcels]
            for number, batch in enumerate(self._batches)
            if number not in whole
        }
        reported: ReportedTensors = {}
        values: list[PoolCall] = []
        for number, calls in sums.items():
            (unit,) = self._batches[number].units
            combined = self._combined(self._batches[number], results(calls))
            reported[unit.name] = {name: combined[name] for name in self._aggregator.reported}
            for parcel in self._batches[number].parcels:
                packed = [pack(combined)] * len(parcel)
                values.append(self._pool.call("values", self._access, round_, parcel, packed, self._piece()))
        pieces = []
        for (number, _), (piece, packed) in zip(whole.items(), results(list(whole.values())), strict=True):
            pieces.append(piece)
            for unit, of_unit in zip(self._batches[number].units, packed, strict=True):
                reported[unit.name] = dict(unpack(of_unit))
        pieces += results(values)
        return pieces, {unit.name: reported[unit.name] for batch in self._batches for unit in batch.units}

    def _combined(self, batch: UnitBatch, answers: Sequence[Any]) -> Tensors:
        (unit,) = batch.units
        partials: dict[Block, Tensors] = {}
        for parcel, packed in zip(batch.parcels, answers, strict=True):
            partials.update(zip(parcel, map(unpack, packed), strict=True))
        return self._aggregator.combine(unit, [partials[block] for block in unit.blocks], self._updates)

    def _round(self) -> Any:
        from attune.features.cluster.workers import PresentValues, StoredRound

        values = {key: self._vault.read(key) for key in self._aggregator.reads(self._updates)}
        return StoredRound(self._spec, list(self._updates), PresentValues(self._vault.keys(), values), self._blobs.ranges)

    def _piece(self) -> str:
        """Return the name of the next piece; a start removes it if this process is killed."""
        self._pieces.append(f"{self._blobs.objects}piece.{self._token}.{len(self._pieces)}")
        return self._pieces[-1]

    def _shares_of(self, keys: Sequence[str]) -> Iterator[Sequence[str]]:
        count = max(1, min(KEYS_A_CALL, len(keys) // (CALLS_A_WORKER * len(self._pool.members))))
        for start in range(0, len(keys), count):
            yield keys[start : start + count]


def results(calls: Sequence[PoolCall]) -> list[Any]:
    """Return the results of all calls, or raise the first error after all of them have ended."""
    answers, first = [], None
    for call in calls:
        try:
            answers.append(call.result())
        except ClusterUnusable:
            raise
        except Exception as error:
            first = first or error
    if first is not None:
        raise first
    return answers


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
