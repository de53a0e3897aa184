"""The immutable state of a round: the durable record, and what the process knows besides, such as devices' paces and debts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from typing import Any

import msgspec
from msgspec.structs import replace
from typing_extensions import Self

from attune.common.exchange.messages import WorkName
from attune.fedserver.core.messages import OrderId, Phase, Record

NOBODY: frozenset[str] = frozenset()


class Round(msgspec.Struct, frozen=True, dict=True):
    """State of the round. All but the record is lost at a restart, or read back. Times are monotonic seconds.

    A round of N devices has N answers, so what each answer needs may not be made anew of all N: `but` passes it on.
    """

    record: Record = msgspec.field(default_factory=Record)
    reported: frozenset[str] = NOBODY  # devices that have answered the open orders
    finished: frozenset[str] = NOBODY  # devices that have handed in their last evaluation
    newcomers: frozenset[str] = NOBODY  # connected devices that get rounds of their own after the end
    connected: frozenset[str] = NOBODY
    outside: frozenset[str] = NOBODY  # devices that get no order of training (`round.devices`)
    left_at: Mapping[str, float] = {}  # when a device disconnected
    losses: Mapping[str, float] = {}  # training losses reported for the open orders
    troubled: frozenset[str] = NOBODY  # devices that say they cannot carry out the open orders
    moved_at: Mapping[str, float] = {}  # last sign of progress with the open orders
    missed: Counts = {}  # missed orders, by kind of work and device
    pace: Mapping[str, FleetPace] = {}  # durations, by kind of work or of exchange
    asked_at: Mapping[str, float] = {}  # when a device got its open order
    ended_at: Mapping[str, float] = {}  # when it answered, or was excused
    charged_at: float = 0.0  # until when missed time is among `missed`
    deadline: float = 0.0  # of the open orders
    now: float = 0.0  # of the latest event
    unix: float = 0.0  # unix time of the latest event, for display

    @classmethod
    def of(
        cls,
        record: Record,
        reported: Iterable[str],
        finished: Iterable[str] = (),
        losses: Mapping[str, float] | None = None,
    ) -> Self:
        """Return the state at a start. `reported` and `losses` come from the inbox, `finished` from the ledger."""
        answered = frozenset(reported)
        done = frozenset(finished) - record.adapting.keys()
        finished = done | answered if record.revive().phase is Phase.DONE else done
        return cls(record, answered, finished, losses=losses or {})

    @cached_property
    def awaited(self) -> frozenset[str]:
        """Devices that hold an order and have not answered it."""
        return frozenset(self.record.devices) - self.reported - frozenset(self.record.excused)

    @property
    def training(self) -> frozenset[str]:
        """Devices of buffered rounds that hold an order of training, of this or an earlier round."""
        return frozenset(self.record.begun) - frozenset(self.record.arrived) - frozenset(self.record.excused)

    def receivers(self, devices: Collection[str]) -> Collection[str]:
        """Return the devices for which served values are made together; in buffered rounds others have older values."""
        return devices if self.record.begun else self.record.devices

    def hands_in(self, name: str) -> bool:
        """Return whether the update of a device that trains is for the next state, or for a later one."""
        return name in self.record.cohort or name in self.record.begun

    @property
    def updates(self) -> frozenset[str]:
        """Devices whose updates would be aggregated."""
        return self.reported & frozenset(self.record.cohort)

    @property
    def work(self) -> WorkName:
        """The kind of work of the open orders."""
        return self.record.open_orders[0]

    @property
    def took(self) -> Mapping[str, float]:
        """Seconds that each device needed for its answer to the open orders."""
        answered = self.reported & self.ended_at.keys() & self.asked_at.keys()
        return {name: seconds for name in answered if (seconds := self.ended_at[name] - self.asked_at[name]) >= 0}

    @property
    def last_answer(self) -> float:
        """When the last of the open orders was answered; before that, since when they are waited for."""
        return max([self.charged_at, *(self.ended_at.get(name, 0.0) for name in self.reported)])

    @property
    def inside(self) -> frozenset[str]:
        """Connected devices that may train."""
        return self.connected - self.outside

    @property
    def idle(self) -> frozenset[str]:
        """Connected devices that may train and hold no open order."""
        return self.inside - frozenset(self.record.devices)

    def but(self, **changes: Any) -> Self:
        """Return the state with these fields changed, which are neither the record nor who has reported."""
        changed = replace(self, **changes)
        vars(changed).update(vars(self))
        return changed

    def noting(self, **changes: Any) -> Self:
        """Return the state with these fields of its record changed."""
        return replace(self, record=replace(self.record, **changes))

    def ordering(self, phase: Phase, devices: Collection[str], cohort: Collection[str], now: float, deadline_s: float) -> Self:
        """Replace the open orders by new ones for `devices`. Absent devices keep their grace period, from when they left."""
        going_on = self.record.begun  # devices of buffered rounds whose training goes on: their times stay
        opened = self.noting(
            phase=phase,
            devices=tuple(sorted(devices)),
            cohort=tuple(sorted(cohort)),
            excused=(),
            replaced=(),
            opened_at=self.unix,
        )
        return replace(
            opened,
            reported=NOBODY,
            losses=_among(going_on, self.losses),
            troubled=NOBODY,
            left_at=dict.fromkeys(set(devices) - self.connected, now) | dict(self.left_at),
            moved_at=dict.fromkeys(devices, now) | _among(going_on, self.moved_at),
            asked_at=dict.fromkeys(devices, now) | _among(going_on, self.asked_at),
            ended_at={},
            charged_at=now,
            deadline=now + deadline_s,
        )

    def joining(self, names: Collection[str], now: float) -> Self:
        """Add devices to the open round."""
        record = self.record
        joined = self.noting(
            devices=tuple(sorted({*record.devices, *names})),
            cohort=tuple(sorted({*record.cohort, *names})),
            replaced=tuple(name for name in record.replaced if name not in names),
        )
        times = dict.fromkeys(names, now)
        return replace(joined, moved_at={**self.moved_at, **times}, asked_at={**self.asked_at, **times})

    def leaving(self, names: Collection[str]) -> Self:
        """Take devices out of the cohort whose places others get."""
        record = self.record
        return self._charging(names, (), {}).noting(
            devices=tuple(name for name in record.devices if name not in names),
            cohort=tuple(name for name in record.cohort if name not in names),
            replaced=tuple(sorted({*record.replaced, *names})),
        )

    def answering(self, name: str, now: float, loss: float | None = None) -> Self:
        """Add a device's durable answer to the open orders. A device that was replaced takes part again."""
        state = self.joining((name,), now) if name in self.record.replaced else self
        if name in state.record.excused:
            state = state.noting(excused=tuple(other for other in state.record.excused if other != name))
        answered = replace(
            state,
            reported=self.reported | {name},
            losses=self.losses if loss is None else {**self.losses, name: loss},
            troubled=self.troubled - {name},
            ended_at={**self.ended_at, name: now},
        )
        vars(answered)["awaited"] = state.awaited - {name}
        return answered

    def excusing(self, name: str, troubled: bool) -> Self:
        """Let the open step go on without a device that holds an order."""
        if name in self.record.arrived:  # its update is here: the trouble came late
            return self
        if name not in self.awaited:
            return self.dropping((name,)) if name in self.training else self
        excused = self.noting(excused=(*self.record.excused, name))
        troubles = self.troubled | {name} if troubled else self.troubled
        return replace(excused, troubled=troubles, ended_at={**self.ended_at, name: self.now})

    def dropping(self, names: Collection[str]) -> Self:
        """Forget the training orders of these devices in buffered rounds. What they hand in for them is late."""
        record = self.record
        return self.noting(
            begun={name: number for name, number in record.begun.items() if name not in names},
            arrived=tuple(name for name in record.arrived if name not in names),
            devices=tuple(name for name in record.devices if name not in names),
            cohort=tuple(name for name in record.cohort if name not in names),
        )

    def expelling(self, name: str) -> Self:
        """Remove a device from the round and from the end of the federation."""
        state = self.dropping((name,)) if name in self.record.begun else self
        record, gone = state.record, {name}
        less = state.noting(
            **{
                key: tuple(n for n in getattr(record, key) if n != name) for key in ("devices", "cohort", "excused", "replaced")
            },
        )
        changes = {key: getattr(self, key) - gone for key in ("reported", "finished", "newcomers", "connected", "troubled")}
        missed = {work: without(counts, name) for work, counts in self.missed.items()}
        return replace(less, **changes, missed=missed, losses=without(self.losses, name), left_at=without(self.left_at, name))

    def missing(self, names: Collection[str]) -> Self:
        """Count a missed order of training for each of these devices, which made no other one wait."""
        counts = dict(self.missed.get("train", {}))
        for name in names:
            counts[name] = counts.get(name, Misses()).after(0.0, self.now, in_row=True)
        return replace(self, missed={**self.missed, "train": counts}) if names else self

    def extending(self, asked: Collection[str], now: float, deadline_s: float) -> Self:
        """Restart the deadline of the open orders, which are sent again to the devices in `asked`."""
        moved_at = {**self.moved_at, **dict.fromkeys(asked, now)}
        return replace(self.noting(excused=()), moved_at=moved_at, charged_at=now, deadline=now + deadline_s)

    def running_out(self, overdue: Iterable[str], slow: Mapping[str, float] | None = None) -> Self:
        """Count the missed orders of a step that closes or is extended now, and what each of them cost the others.

        Args:
            overdue: Devices that were waited for to the end.
            slow: Devices that answered, and for how many seconds too many the others waited for them.
        """
        return self._charging(frozenset(self.record.devices) - self.reported, overdue, slow or {})

    def pacing(self) -> Self:
        """Note the durations of a step that closes now."""
        work, took = self.work, self.took
        return replace(self, pace={**self.pace, work: self.pace.get(work, FleetPace()).after(took)}) if took else self

    def exchanged(self, kind: str, took: Mapping[str, float], costs: Mapping[str, float]) -> Self:
        """Note the durations of an exchange, and what devices cost the others in it. It is a part of their training."""
        counts, pace = dict(self.missed.get("train", {})), self.pace.get(kind, FleetPace())
        for name, cost_s in costs.items():
            counts[name] = counts.get(name, Misses()).after(cost_s, self.now, in_row=False)
        missed = {**self.missed, "train": counts} if costs else self.missed
        return replace(self, missed=missed, pace={**self.pace, kind: pace.after(took)} if took else self.pace)

    def _charging(self, names: Collection[str], overdue: Iterable[str], slow: Mapping[str, float]) -> Self:
        """Count a missed order for those devices that cost the others time, or are overdue.

        If most devices miss it, it is the order or its deadline, and none of them is charged.
        """
        work, late, few = self.work, frozenset(overdue), 2 * len(frozenset(names)) <= len(self.record.devices)
        since, counts = self.last_answer, dict(self.missed.get(work, {}))
        for name, cost_s in slow.items():
            counts[name] = counts.get(name, Misses()).after(cost_s, self.now, in_row=False)
        for name in names:
            waited_s = self.ended_at.get(name, self.now) - max(since, self.asked_at.get(name, since))
            cost_s = max(0.0, waited_s) if few else 0.0
            if cost_s or name in late:
                counts[name] = counts.get(name, Misses()).after(cost_s, self.now, in_row=name in late)
        return replace(self, missed={**self.missed, work: counts})


def _among(names: Collection[str], values: Mapping[str, float]) -> dict[str, float]:
    """Return the values of these names alone."""
    return {name: value for name, value in values.items() if name in names}


def without(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return `values` without one key; the same object if the key is not there."""
    return {key: value for key, value in values.items() if key != name} if name in values else values


def training_orders(record: Record) -> list[OrderId]:
    """Return the orders of buffered rounds, which go on from round to round."""
    return [OrderId("train", number, name) for name, number in record.begun.items()]


def with_arrivals(record: Record, here: Collection[str]) -> tuple[Record, frozenset[str]]:
    """Return the record with the updates that the inbox has of buffered rounds, and the devices of which it has had one."""
    arrived = [name for name in record.arrived if name in here]  # then those whose receipt did not go out any more
    return replace(record, arrived=(*arrived, *sorted({*here} - {*arrived}))), frozenset(record.arrived)


# --- Missed orders of each device, what they cost the others, and how long devices take.
#
# A device that misses two orders of one kind of work in a row gets no more of them until it shows that it works again. Signs
# of life are cheap for a hostile device, so a miss also leaves a debt: the seconds for which the others waited for it, times
# SHARE. A device that answers, but much later than the fleet, leaves a debt for the time beyond the fleet's limit. Nobody
# waits for a device in debt; its answer counts if it is there in time. In the long run a device costs at most 1 / SHARE of
# the time, and in one hour less than a tenth: one wait is at most LONGEST_S, and a shorter one can come twice.
#
# Training and evaluation are counted apart, for a device may answer one and never the other, but a debt is one for both.

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
