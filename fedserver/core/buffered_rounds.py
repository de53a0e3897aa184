"""Buffered rounds: devices train without waiting for one another, and each K updates that are in make the next state.

Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek and Huba, "Federated Learning with Buffered Asynchronous Aggregation", AISTATS
2022 (FedBuff). The staleness s of an update says how many states are newer than the one from which its training began, and its
weight is (1 + s)^-a.

A round is open until its buffer is full. Devices that have not answered by then keep their orders, and their updates count in
a later round. A device trains from each state once at most: after it has handed in, it gets its next order as soon as there is
a newer state. So a buffer has one update of a device at most, and what the server keeps of a device alone (an attended value,
an embedding) includes all that the device has handed in before.

An earlier run is repeated by the log of its arrivals, which says who trains from which state, and when a round closes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from msgspec.structs import replace

from attune.common.errors import SettingError
from attune.fedserver.core.messages import Acknowledge, Aggregated, DiscardStale, Effect, Open, Phase, Record, Reported
from attune.fedserver.core.phases import (
    AggregatingPhase,
    EvaluationPhase,
    FailedPhase,
    PhaseKey,
    PhaseVerbs,
    Rules,
    Step,
    TrainingPhase,
    WaitingPhase,
    sent_again,
    was_counted,
)
from attune.fedserver.core.policy import Asked, Synchronous, passed_over, quorum_of, spoiled
from attune.fedserver.core.state import Round, without

if TYPE_CHECKING:
    from attune.fedserver.core.records import Arrival


def closing_round(record: Record) -> int:
    """Return the round in which an update that arrives now is aggregated."""
    return record.round + (2 if record.revive().phase is Phase.AGGREGATING else 1)


@dataclass(frozen=True)
class BufferedRounds(Synchronous):
    """Rounds that a buffer of updates closes. Evaluations, and the rounds of newcomers after the end, are synchronous."""

    def ask(self, state: Round) -> Asked:
        """Choose idle devices for the places that are free. A failed device is idle again in the next round."""
        record, settings = state.record, self.settings
        idle, aside = state.connected - record.begun.keys(), passed_over(state)
        names = sorted(idle - aside if len(state.connected - aside) >= settings.min_clients else idle)
        if record.paused:
            names = []
        elif settings.clients:
            free = max(0, settings.clients - len(set(self._waited_for(state, state.now))))
            drawn = self._draw("order", record.round + 1, len(record.begun), len(record.arrived))
            names = sorted(drawn.sample(names, min(free, len(names))))
        return Asked(tuple(names), tuple(names))

    def ask_to_evaluate(self, state: Round) -> frozenset[str]:
        """Choose devices that are not training. Once all rounds are closed none is."""
        return super().ask_to_evaluate(state) - state.record.begun.keys()

    def complete(self, state: Round, now: float) -> bool:
        """Return whether the buffer is full, or has a quorum and no device is worth waiting for."""
        if state.record.adapting:
            return super().complete(state, now)
        updates, full = len(state.updates), self.settings.buffer
        return updates >= full or (
            updates >= max(1, min(full, quorum_of(self.settings, state.record))) and self.over(state, now)
        )

    def overdue(self, state: Round, now: float) -> frozenset[str]:
        """Return the devices that have had an order of training for longer than `round.deadline_s`."""
        if state.work != "train" or state.record.adapting:
            return super().overdue(state, now)
        return frozenset(name for name in state.awaited if now >= self._ends_at(state, name))

    def worth(self, state: Round, work: str, number: int, name: str) -> float:
        record = state.record
        if work != "train" or record.adapting:
            return super().worth(state, work, number, name)
        stale, most = closing_round(record) - number, self.settings.max_staleness
        if record.begun.get(name) != number or name in record.arrived or closing_round(record) > self.settings.rounds:
            return 0.0
        return 0.0 if 0 < most < stale else staleness_weight(stale, self.settings.staleness)

    def wakes(self, state: Round) -> frozenset[float]:
        ends = {self._ends_at(state, name) for name in state.awaited} if state.work == "train" else set()
        return super().wakes(state) | ends

    def _ends_at(self, state: Round, name: str) -> float:
        return state.asked_at.get(name, state.charged_at) + self.settings.deadline_s

    def _unhurried(self, state: Round) -> bool:
        buffered = state.work == "train" and not state.record.adapting
        return buffered or super()._unhurried(state)


def staleness_weight(staleness: int, exponent: float) -> float:
    """Return (1 + s)^-a, the weight of an update (FedBuff, section 5: a = 1/2)."""
    return float((1 + staleness) ** -exponent)


class Buffering(PhaseVerbs):
    """Reports of training in any phase: an update that comes between two rounds waits in the buffer of the next one."""

    def report(self, rules: Rules, state: Round, event: Reported) -> Step:
        record, name = state.record, event.name
        if event.work != "train" or record.adapting:
            return super().report(rules, state, event)
        if rules.policy.worth(state, event.work, event.round, name) > 0:
            arrived = _arriving(state, event)
            return self.progress(rules, arrived, event.now).after(Acknowledge(name, accepted=True))
        if name in record.arrived and record.begun[name] == event.round:
            return Step(state, (Acknowledge(name, accepted=True),))
        if record.begun.get(name) != event.round:
            late = Acknowledge(name, was_counted(state, event))  # it shows that the device works, which may be asked again
            return self.progress(rules, state, event.now).after(late)
        stale = DiscardStale(name, closing_round(record) - event.round)
        dropped = state.dropping((name,)).noting(discarded=record.discarded + 1)
        return self.progress(rules, dropped, event.now).after(stale, Acknowledge(name, accepted=False))


def _arriving(state: Round, event: Reported) -> Round:
    """Put an update that is durable in the inbox into the buffer."""
    name, losses = event.name, state.losses
    buffered = state.noting(arrived=(*state.record.arrived, name))
    if state.record.phase is Phase.TRAINING:
        return buffered.answering(name, event.now, event.loss)
    return replace(buffered, losses=losses if event.loss is None else {**losses, name: event.loss})


class BufferedTraining(Buffering, TrainingPhase):
    """Devices train; the round closes when the buffer is full."""

    def enter(self, rules: Rules, state: Round, now: float) -> Step:
        """Open a round with the orders that go on, and send new ones to devices that have none."""
        going_on = state.record.begun.keys()
        again = sent_again(state, state.training & state.connected - state.asked_at.keys())
        opened = state.ordering(Phase.TRAINING, going_on, going_on, now, rules.settings.deadline_s)
        return self.progress(rules, replace(opened, reported=frozenset(state.record.arrived)), now).after(*again)

    def resume(self, rules: Rules, state: Round, now: float) -> Step:
        names = tuple(sorted(state.record.begun))
        again = replace(state.noting(devices=names, cohort=names), reported=frozenset(state.record.arrived))
        return super().resume(rules, again, now)

    def unpaused(self, rules: Rules, state: Round, now: float) -> Step:
        return self.progress(rules, state, now)

    def progress(self, rules: Rules, state: Round, now: float) -> Step:
        """Close the round if its buffer is full; otherwise let no place be idle, and see whether waiting makes sense."""
        effects: tuple[Effect, ...] = ()
        if len(state.updates) < rules.settings.buffer:
            state, effects = self._asking(rules, state, now)
        complete = rules.policy.complete(state, now)
        if back := spoiled(state, rules.settings.take_back, complete=complete):
            return Step(state.noting(spoiled=back.why, back_to=back.to), effects, PhaseKey.AGGREGATING)
        if not complete:
            return Step(state, effects)
        first = [name for name in state.record.arrived if name in state.updates][: rules.settings.buffer]
        return Step(state.noting(cohort=tuple(sorted(first))), effects, PhaseKey.AGGREGATING)

    def _asking(self, rules: Rules, state: Round, now: float) -> tuple[Round, tuple[Effect, ...]]:
        """Withdraw orders that ran out, ask failed devices again at the deadline, and give free places to idle devices."""
        overdue, number = rules.policy.overdue(state, now), state.record.round + 1
        state = state.missing(overdue).dropping(overdue) if overdue else state
        if now >= state.deadline and not rules.policy.complete(state, now):
            state = state.dropping(state.record.excused).extending((), now, rules.settings.deadline_s)
        names = rules.policy.ask(state).devices
        if not names:
            return state, ()
        begun = {**state.record.begun, **dict.fromkeys(names, number)}
        return state.noting(begun=begun).joining(names, now), (Open("train", number, names),)


class BufferedAggregating(Buffering, AggregatingPhase):
    """The first updates of the buffer become the next state; devices go on training meanwhile."""

    def connect(self, rules: Rules, state: Round, name: str, now: float) -> Step:
        """Note a device that came back. It gets its order again with the next round, since nothing can be served now."""
        return Step(replace(state, asked_at=without(state.asked_at, name)))

    def aggregated(self, rules: Rules, state: Round, event: Aggregated) -> Step:
        """Go on as in synchronous rounds. After the last round, and when the state is taken back, no order stays open."""
        step, record = super().aggregated(rules, state, event), state.record
        over = bool(record.spoiled) or step.state.record.round >= rules.settings.rounds
        failed = set(record.excused) - set(record.arrived)
        through = set(record.begun) if over else failed | set(record.cohort)
        noted = step.state.noting(
            begun={name: number for name, number in record.begun.items() if name not in through},
            arrived=tuple(name for name in record.arrived if name not in through),
            last_begun={name: record.begun[name] for name in step.state.record.last_cohort if name in record.begun},
        )
        return Step(noted, step.effects, step.then)


class _BetweenRounds(Buffering):
    """A phase without training in which values can be served: a device that comes back gets its order of training again."""

    def connect(self, rules: Rules, state: Round, name: str, now: float) -> Step:
        return super().connect(rules, state, name, now).after(*sent_again(state, {name} & state.training))


class BufferedEvaluation(_BetweenRounds, EvaluationPhase):
    """Devices that are not training evaluate the new state. The others go on."""


class BufferedWaiting(_BetweenRounds, WaitingPhase):
    """No round can open; updates of orders that are out wait in the buffer."""


class BufferedFailed(Buffering, FailedPhase):
    """A step could not be carried out; updates wait in the buffer until it is tried again."""


BUFFERED: dict[PhaseKey, PhaseVerbs] = {
    PhaseKey.WAITING: BufferedWaiting(),
    PhaseKey.TRAINING: BufferedTraining(),
    PhaseKey.AGGREGATING: BufferedAggregating(),
    PhaseKey.EVALUATION: BufferedEvaluation(),
    PhaseKey.FAILED: BufferedFailed(),
}


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
