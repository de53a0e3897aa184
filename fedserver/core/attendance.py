"""Missed orders of each device, what they cost the others, and how long devices take: pure code.

A device that misses two orders of one kind of work in a row gets no more of them until it shows that it works again. Signs of
life are cheap for a hostile device, so a miss also leaves a debt: the seconds for which the others waited for it, times SHARE.
A device that answers, but much later than the fleet, leaves a debt for the time beyond the fleet's limit. Nobody waits for a
device in debt; its answer counts if it is there in time. In the long run a device costs at most 1 / SHARE of the time, and in
one hour less than a tenth: one wait is at most LONGEST_S, and a shorter one can come twice.

Training and evaluation are counted apart, for a device may answer one and never the other, but a debt is one for both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec
from typing_extensions import Self

from attune.common.exchange.messages import WorkName

PATIENCE = 2  # missed orders in a row after which a device is passed over
LIMIT = 3  # missed orders, in a row or not, within the time of their debt
SHARE = 20.0
QUANTILE = 2 / 3  # of the devices' durations: a third of the devices that is slow does not move it
STEPS = 3  # first steps of a process, after which there is a pace
FIRST_S = 120.0  # least time for an order in these steps: models are built, processors are warmed up
EXTRA_S = 120.0  # beyond the fleet's limit, for a device that is known to be slow
LONGEST_S = 300.0  # for which the others wait for a device after their last answer


class Misses(msgspec.Struct, frozen=True):
    """Missed orders of one device and one kind of work."""

    in_row: int = 0
    count: int = 0  # since it had no debt
    paid_at: float = 0.0  # monotonic; when its debt has run off

    def after(self, cost_s: float, now: float, *, in_row: bool) -> Self:
        """Return the misses with one more, for which the others waited `cost_s` seconds."""
        indebted = self.paid_at > now
        count = (self.count if indebted else 0) + (cost_s > 0)
        paid_at = (self.paid_at if indebted else now) + SHARE * cost_s
        return msgspec.structs.replace(self, in_row=self.in_row + in_row, count=count, paid_at=paid_at)

    def passed_over(self, now: float) -> bool:
        return self.in_row >= PATIENCE or (self.count >= LIMIT and self.paid_at > now)


class FleetPace(msgspec.Struct, frozen=True):
    """Durations of one kind of work, measured by the server.

    Attributes:
        took: Seconds that each device needed for its latest answered order.
        usual_s: The seconds in which QUANTILE of the devices answer.
        steps: How many steps were measured.
    """

    took: Mapping[str, float] = {}
    usual_s: float = 0.0
    steps: int = 0

    def after(self, took: Mapping[str, float]) -> Self:
        """Return the pace with the answers of one more step."""
        merged = {**self.took, **took}
        usual_s = sorted(merged.values())[math.ceil(QUANTILE * len(merged)) - 1] if merged else 0.0
        return type(self)(merged, usual_s, self.steps + 1)

    def patience_s(self, awaited: Iterable[str], fair_s: float) -> float:
        """Return for how many seconds an order waits for these devices. What is beyond `fair_s` becomes their debt."""
        if self.steps <= STEPS:  # the open step is among them
            return max(fair_s, FIRST_S)
        slowest_s = max((self.took.get(name, 0.0) for name in awaited), default=0.0)
        return max(fair_s, min(1.5 * slowest_s, fair_s + EXTRA_S))


Counts = Mapping[WorkName, Mapping[str, Misses]]


def indebted(missed: Counts, now: float) -> frozenset[str]:
    """Return the devices that made others wait and have not paid for it yet."""
    return frozenset(name for counts in missed.values() for name, misses in counts.items() if misses.paid_at > now)


def forgiven(missed: Counts, name: str, *works: WorkName) -> Counts:
    """Return the counts without the orders in a row of this device. What it owes stays."""
    changed = {
        work: {**missed[work], name: msgspec.structs.replace(missed[work][name], in_row=0)}
        for work in works
        if work in missed and name in missed[work] and missed[work][name].in_row
    }
    return {**missed, **changed} if changed else missed
