"""Carries out rounds on a team of workers: partials there, `combine` here, `apply` there, and the values come back.

The bits are those of one process: a parcel has whole blocks, and what they come to is put together in the order of the blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

from attune.common.wire.blobs import Blob
from attune.common.wire.header import Manifest
from attune.fedserver.lab.aggregators.base import Block, Blockwise, PartUpdate, Put, Tensors, Unit, Vault, manifest_in
from attune.fedserver.lab.aggregators.carrier import Carried, in_turn
from attune.fedserver.lab.build import AggregatorSpec
from attune.fedserver.lab.cluster.columns import After, Before, columns_of
from attune.fedserver.lab.cluster.crew import Unavailable
from attune.fedserver.lab.cluster.parcels import PARCEL_BYTES, Parcel, Stage, stages_of
from attune.fedserver.lab.cluster.rows import Sent, received, row_of, sent, size_bytes, tensors_in
from attune.fedserver.lab.cluster.team import Holding, Place, Seat, Task, Team


class BlobVault(Vault, Protocol):
    """A vault of which each key is a blob: its digest says which value a worker holds."""

    def blob(self, key: str) -> Blob: ...


@dataclass(frozen=True)
class _Round:
    """What all parcels of a round share. keys: of the vault, that are read."""

    aggregator: Blockwise
    updates: Sequence[PartUpdate]
    manifest: Manifest
    keys: Sequence[str]


@dataclass(frozen=True)
class _Step:
    """A parcel, and its call that is under way; None where nothing is to be asked of a worker."""

    parcel: Parcel
    manifest: Manifest
    task: Task | None


class Spread:
    """Implements aggregators.carrier.Carrier for one part. If the team is gone, the rest of a round is carried out here.

    At a time two parcels for each worker are under way, or one unit's.
    """

    def __init__(self, team: Team, job: AggregatorSpec, vault: BlobVault, parcel_bytes: int = PARCEL_BYTES) -> None:
        self._team, self._job, self._vault, self._parcel_bytes = team, job, vault, parcel_bytes
        self._fresh: list[tuple[Seat, int, Place, int]] = []  # what workers hold of this round: seat, life, place, bytes

    def __repr__(self) -> str:
        return f"Spread({self._job.part} over {self._team})"

    def carry(self, aggregator: Blockwise, updates: Sequence[PartUpdate]) -> Iterator[Carried]:
        self._fresh = []
        units, done = aggregator.units(), 0
        if self._team.present:
            try:
                for carried in self._carried(aggregator, units, updates):
                    done += 1
                    yield carried
            except Unavailable as why:
                self._team.give_up(why)
        yield from in_turn(aggregator, units[done:], updates)

    def written(self) -> None:
        """From now on what the workers hold of this round has a digest."""
        for seat, life, place, held_bytes in self._fresh:
            if life == seat.life:
                seat.held[place] = Holding(self._vault.blob(place[2]).digest, held_bytes)
        self._fresh = []

    def _carried(self, aggregator: Blockwise, units: Sequence[Unit], updates: Sequence[PartUpdate]) -> Iterator[Carried]:
        round_ = _Round(aggregator, updates, manifest_in(updates[0].tensors), aggregator.reads(updates))
        begun: deque[tuple[Stage, list[_Step]]] = deque()
        applied: deque[tuple[Stage, Mapping[str, Tensors], list[_Step]]] = deque()
        ahead = len(self._team.seats)
        for stage in stages_of(units, round_.manifest, self._parcel_bytes):
            begun.append((stage, self._begin(round_, stage)))
            if len(begun) > ahead:
                applied.append(self._combine(round_, *begun.popleft()))
            if len(applied) > ahead:
                yield from self._finish(round_, *applied.popleft())
        while begun:
            applied.append(self._combine(round_, *begun.popleft()))
        while applied:
            yield from self._finish(round_, *applied.popleft())

    def _begin(self, round_: _Round, stage: Stage) -> list[_Step]:
        keep = len(stage.parcels) == 1 and not stage.units[0].summed
        return [self._partial(round_, parcel, keep) for parcel in stage.parcels]

    def _partial(self, round_: _Round, parcel: Parcel, keep: bool) -> _Step:
        manifest = parcel.manifest(round_.manifest)

        def message(seat: Seat) -> Sequence[Any]:
            return self._job, parcel, columns_of(round_.updates, manifest), round_.keys, keep

        return _Step(parcel, manifest, Task(self._seat(parcel, manifest), "partial", message))

    def _combine(
        self, round_: _Round, stage: Stage, steps: Sequence[_Step]
    ) -> tuple[Stage, Mapping[str, Tensors], list[_Step]]:
        partials: dict[Block, Tensors] = {}
        for step in steps:
            assert step.task is not None  # noqa: S101 (every parcel has a partial)
            found: list[Sent] = step.task.answer()
            partials.update(zip(step.parcel.blocks, map(received, found), strict=True))
        combined = {
            unit.name: round_.aggregator.combine(unit, [partials[block] for block in unit.blocks], round_.updates)
            for unit in stage.units
        }
        if stage.units[0].summed:
            return stage, combined, [_Step(step.parcel, step.manifest, None) for step in steps]
        kept = len(steps) == 1
        return stage, combined, [self._apply(round_, step, combined, kept) for step in steps]

    def _apply(self, round_: _Round, begun: _Step, combined: Mapping[str, Tensors], kept: bool) -> _Step:
        parcel, manifest, task = begun.parcel, begun.manifest, begun.task
        assert task is not None  # noqa: S101 (every parcel has a partial)
        each = [sent(combined[block.unit]) for block in parcel.blocks]
        row_bytes = sum(spec.size_bytes for spec in manifest.values())

        def message(seat: Seat) -> Sequence[Any]:
            columns = None if kept and seat.life == task.life else columns_of(round_.updates, manifest)
            before = self._before(round_, seat, parcel, manifest, row_bytes)
            return self._job, parcel, each, before, manifest, columns

        return _Step(parcel, manifest, Task(self._seat(parcel, manifest), "apply", message))

    def _before(self, round_: _Round, seat: Seat, parcel: Parcel, manifest: Manifest, row_bytes: int) -> Before:
        """What of the state the worker needs to be sent. What it holds of these keys is not true any more afterwards."""
        rows, places = {}, {key: (self._job.part, parcel.number, key) for key in round_.keys}
        for key, place in places.items():
            holding = seat.held.pop(place, None)
            if holding is None or holding.digest != self._vault.blob(key).digest:
                rows[key] = row_of(self._vault.read(key), manifest)
        changed = 1 + len(round_.updates)
        return Before(round_.keys, rows, seat.make_room(changed * row_bytes, set(places.values())))

    def _finish(
        self, round_: _Round, stage: Stage, combined: Mapping[str, Tensors], steps: Sequence[_Step]
    ) -> Iterator[Carried]:
        puts: dict[Block, list[Put]] = {}
        for step in steps:
            if step.task is None:
                continue
            after: After = step.task.answer()
            self._note(step.task, step.parcel, after)
            values = {key: tensors_in(row, after.manifest) for key, row in after.rows.items()}
            for block, names in zip(step.parcel.blocks, after.names, strict=True):
                puts[block] = [(key, name, tensors[name]) for name in names for key, tensors in values.items()]
        for unit in stage.units:
            yield (
                unit,
                combined[unit.name],
                chain.from_iterable(
                    round_.aggregator.apply(block, combined[unit.name], round_.updates) if unit.summed else puts[block]
                    for block in unit.blocks
                ),
            )

    def _note(self, task: Task, parcel: Parcel, after: After) -> None:
        for key, row in after.rows.items():
            self._fresh.append((task.seat, task.life, (self._job.part, parcel.number, key), size_bytes([row])))

    def _seat(self, parcel: Parcel, manifest: Manifest) -> Seat:
        return self._team.seat(self._job.part, parcel.number, sum(spec.size_bytes for spec in manifest.values()))
