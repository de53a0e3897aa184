"""Who carries out a round's pieces: this process, one unit after the other, unless the lab has others to do it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol

from attune.fedserver.lab.aggregators.base import Blockwise, PartUpdate, Put, Tensors, Unit

Carried = tuple[Unit, Tensors, Iterable[Put]]  # a unit, what was combined for it, and the next values of its blocks


class Carrier(Protocol):
    """Of one aggregator's rounds. The bits do not depend on it."""

    def carry(self, aggregator: Blockwise, updates: Sequence[PartUpdate]) -> Iterator[Carried]:
        """All units in their order; what is put of one is taken before the next is asked for."""
        ...

    def written(self) -> None:
        """What was put is in the vault now."""
        ...


class InTurn:
    """Everything here, a unit at a time."""

    def __repr__(self) -> str:
        return "InTurn()"

    def carry(self, aggregator: Blockwise, updates: Sequence[PartUpdate]) -> Iterator[Carried]:
        return in_turn(aggregator, aggregator.units(), updates)

    def written(self) -> None:
        """Nobody needs to know."""


IN_TURN = InTurn()


def in_turn(aggregator: Blockwise, units: Iterable[Unit], updates: Sequence[PartUpdate]) -> Iterator[Carried]:
    """These units, here."""
    for unit in units:
        combined = aggregator.combine(unit, [aggregator.partial(block, updates) for block in unit.blocks], updates)
        yield unit, combined, chain.from_iterable(aggregator.apply(block, combined, updates) for block in unit.blocks)
