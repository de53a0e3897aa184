"""How a round's work is cut: blocks of columns go to workers in parcels that are worth a call, and always to the same one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from attune.common.wire.header import Manifest
from attune.fedserver.lab.aggregators.base import Block, Unit

PARCEL_BYTES = 1 << 20  # of one client: a call takes milliseconds, however little it carries


@dataclass(frozen=True)
class Parcel:
    """Columns that one worker has: those of its blocks. number: in the part, whoever has it."""

    number: int
    blocks: tuple[Block, ...]

    def manifest(self, part: Manifest) -> Manifest:
        """Of its columns."""
        return {name: part[name] for block in self.blocks for name in block.names}


@dataclass(frozen=True)
class Stage:
    """Units that are combined together, and the parcels with all of their blocks, in the order of the units."""

    units: tuple[Unit, ...]
    parcels: tuple[Parcel, ...]


def stages_of(units: Iterable[Unit], manifest: Manifest, parcel_bytes: int = PARCEL_BYTES) -> list[Stage]:
    """A unit of many blocks is a stage of several parcels; other units share a stage of one parcel while they are small.

    It follows from units and shapes alone, so a parcel is the same one in every round.
    """
    stages: list[Stage] = []
    waiting: list[Unit] = []
    numbers = iter(range(1 << 62))

    def flush() -> None:
        if waiting:
            blocks = tuple(block for unit in waiting for block in unit.blocks)
            stages.append(Stage(tuple(waiting), (Parcel(next(numbers), blocks),)))
            waiting.clear()

    for unit in units:
        if len(unit.blocks) > 1:
            flush()
            parcels = tuple(Parcel(next(numbers), blocks) for blocks in _filled(unit.blocks, manifest, parcel_bytes))
            stages.append(Stage((unit,), parcels))
            continue
        together = [block for each in (*waiting, unit) for block in each.blocks]
        if waiting and (_bytes(together, manifest) > parcel_bytes or waiting[0].summed != unit.summed):
            flush()
        waiting.append(unit)
    flush()
    return stages


def _filled(blocks: Sequence[Block], manifest: Manifest, parcel_bytes: int) -> Iterator[tuple[Block, ...]]:
    """Blocks in their order, as many together as fit."""
    together: list[Block] = []
    for block in blocks:
        if together and _bytes([*together, block], manifest) > parcel_bytes:
            yield tuple(together)
            together = []
        together.append(block)
    yield tuple(together)


def _bytes(blocks: Iterable[Block], manifest: Manifest) -> int:
    """Of one client's tensors in these blocks."""
    return sum(manifest[name].size_bytes for block in blocks for name in block.names)
