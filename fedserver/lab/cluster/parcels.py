"""Parcels: blocks of columns that are worth a call to a worker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from attune.common.wire.header import Manifest
from attune.fedserver.lab.aggregators.base import Block, Unit

PARCEL_BYTES = 1 << 20  # of one client: a call takes milliseconds, even if it carries few bytes
Parcel = tuple[Block, ...]


@dataclass(frozen=True)
class UnitBatch:
    """Units that are combined together, and the parcels with all of their blocks, in the order of the units."""

    units: tuple[Unit, ...]
    parcels: tuple[Parcel, ...]


def unit_batches(units: Iterable[Unit], manifest: Manifest, parcel_bytes: int = PARCEL_BYTES) -> list[UnitBatch]:
    """Cut a round: a unit of many blocks has a batch of several parcels; small units of one block share a parcel."""
    batches: list[UnitBatch] = []
    small: list[Unit] = []

    def flush() -> None:
        if small:
            batches.append(UnitBatch(tuple(small), (tuple(block for unit in small for block in unit.blocks),)))
            small.clear()

    for unit in units:
        if len(unit.blocks) > 1:
            flush()
            batches.append(UnitBatch((unit,), tuple(_filled(unit.blocks, manifest, parcel_bytes))))
            continue
        blocks = [block for other in (*small, unit) for block in other.blocks]
        if small and (_bytes(blocks, manifest) > parcel_bytes or small[0].applied_here != unit.applied_here):
            flush()
        small.append(unit)
    flush()
    return batches


def columns_of(parcel: Parcel, manifest: Manifest) -> Manifest:
    """Return the part of the manifest that the parcel has."""
    return {name: manifest[name] for block in parcel for name in block.names}


def _filled(blocks: Sequence[Block], manifest: Manifest, parcel_bytes: int) -> Iterator[Parcel]:
    """Yield blocks in their order, as many together as fit."""
    parcel: Parcel = ()
    for block in blocks:
        if parcel and _bytes((*parcel, block), manifest) > parcel_bytes:
            yield parcel
            parcel = ()
        parcel = (*parcel, block)
    yield parcel


def _bytes(blocks: Iterable[Block], manifest: Manifest) -> int:
    """Return the size of one client's tensors in these blocks."""
    return sum(manifest[name].size_bytes for block in blocks for name in block.names)
