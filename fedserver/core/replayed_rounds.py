"""Buffered rounds of an earlier run, repeated by the log of its arrivals.

The log says who trains from which state, and when a round closes. So it does not matter why a buffer closed before it was full,
which devices were away, or which updates did not count.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from attune.common.errors import SettingError
from attune.fedserver.core.buffered_rounds import BufferedRounds
from attune.fedserver.core.messages import Record
from attune.fedserver.core.policy import Asked
from attune.fedserver.core.records import DeviceRecord, Report
from attune.fedserver.core.state import Round


class Arrival(NamedTuple):
    """An update that counted: the device, the rounds in which it got its order and in which it was aggregated, from 1.

    A founder was enrolled before round 1 was closed.
    """

    device: str
    order: int
    round: int
    founder: bool = True


def arrivals_of(rows: Iterable[Report], devices: Iterable[DeviceRecord], record: Record) -> list[Arrival]:
    """Return the order in which the updates of buffered rounds arrived, from what the ledger has of a run.

    Raises:
        SettingError: A state was taken back. The updates that had spoiled it are not in the ledger.
    """
    if record.given_up:
        raise SettingError(
            f"this run has no order of arrivals to repeat: the state after round {record.given_up} was taken back"
        )
    founders = {device.name for device in devices if device.founder}
    counted = [(row.round, row.arrival, row) for row in rows if row.arrival is not None and row.staleness is not None]
    return [
        Arrival(row.client, row.round - (row.staleness or 0), row.round, row.client in founders)
        for _, _, row in sorted(counted, key=lambda entry: entry[:2])
    ]


def check_arrivals(arrivals: Sequence[Arrival], names: Collection[str], rounds: int) -> None:
    """Check that buffered rounds can follow a log.

    Raises:
        SettingError: They cannot. The message says why.
    """
    counted: dict[str, int] = {}  # the last round in which an update of the device counted
    number, why = 0, ""
    for device, order, closed, _ in arrivals:
        if device not in names:
            why = f"it names {device}, which has no shard"
        elif closed not in (number, number + 1):
            why = f"no update counted in round {number + 1}"
        elif order > closed:
            why = f"{device} answers in round {closed} an order of round {order}"
        elif order <= counted.get(device, 0):
            why = f"{device} answers in round {closed} an order of round {order}, and had counted in round {counted[device]}"
        if why:
            break
        number = counted[device] = closed
    if not why and number < rounds:
        why = f"it has {number} round{'' if number == 1 else 's'}, and round.rounds is {rounds}"
    if why:
        raise SettingError(f"this order of arrivals cannot be repeated: {why}")


@dataclass(frozen=True)
class ReplayedRounds(BufferedRounds):
    """Buffered rounds by a log that `check_arrivals` has checked. Updates must arrive in its order.

    Attributes:
        arrivals: The log.
    """

    arrivals: Sequence[Arrival] = field(default=(), kw_only=True)

    @cached_property
    def _orders(self) -> dict[int, set[str]]:
        """The devices that got an order in each round, and whose update counted."""
        orders = defaultdict[int, set[str]](set)
        for device, order, _, _ in self.arrivals:
            orders[order].add(device)
        return orders

    @cached_property
    def _sizes(self) -> Counter[int]:
        """The number of updates that closed each round."""
        return Counter(arrival.round for arrival in self.arrivals)

    def ask(self, state: Round) -> Asked:
        asked = self._orders.get(state.record.round + 1, set()) & state.connected - state.record.begun.keys()
        return Asked(tuple(sorted(asked)), tuple(sorted(asked)))

    def complete(self, state: Round, now: float) -> bool:
        if state.record.adapting:
            return super().complete(state, now)
        return len(state.updates) >= self._sizes[state.record.round + 1]

    def overdue(self, state: Round, now: float) -> frozenset[str]:
        """Return no device that trains: the clock of a repeated run stands."""
        if state.work != "train" or state.record.adapting:
            return super().overdue(state, now)
        return frozenset()
