"""Carriers compute the pieces of a round: this process, one unit after the other, or the workers of a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol

from attune.common.exchange.transform import PartUpdate
from attune.fedserver.lab.aggregators.base import Blockwise, Put, Tensors, Unit

Carried = tuple[Unit, Tensors, Iterable[Put]]  # a unit, what was combined for it, and the next values of its blocks


class Carrier(Protocol):
    """Computation of one aggregator's rounds. The bits do not depend on it."""

    def carry(self, aggregator: Blockwise, updates: Sequence[PartUpdate]) -> Iterator[Carried]:
        """Yield all units in order. The caller takes the values of one before it asks for the next."""
        ...


class InTurn:
    """Carrier that computes everything in this process, a unit at a time."""

    def __repr__(self) -> str:
        return "InTurn()"

    def carry(self, aggregator: Blockwise, updates: Sequence[PartUpdate]) -> Iterator[Carried]:
        return in_turn(aggregator, aggregator.units(), updates)


IN_TURN = InTurn()


def in_turn(aggregator: Blockwise, units: Iterable[Unit], updates: Sequence[PartUpdate]) -> Iterator[Carried]:
    """Compute these units in this process."""
    for unit in units:
        combined = aggregator.combine(unit, [aggregator.partial(block, updates) for block in unit.blocks], updates)
        yield unit, combined, chain.from_iterable(aggregator.apply(block, combined, updates) for block in unit.blocks)
