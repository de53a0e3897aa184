"""The phases of a round: what each of them does with every kind of event.

Orders are out in training, in the adaptation of newcomers and in evaluation. In the other phases (waiting, aggregating, done,
failed) the server waits, makes the next state, or serves latecomers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from attune.common.config import RoundSettings
from attune.fedserver.core.messages import (
    Acknowledge,
    Aggregate,
    Aggregated,
    EarlierState,
    Effect,
    FinishDevices,
    GoBack,
    Open,
    Phase,
    Record,
    Reported,
    StrEnum,
)
from attune.fedserver.core.policy import TAKE_BACKS, WINDOW, Policy, median_loss, spoiled
from attune.fedserver.core.state import NOBODY, Round


@dataclass(frozen=True)
class Rules:
    """Rules that stay the same while a process lives.

    Attributes:
        settings: `adapt_rounds` must be 0 for a method that has nothing to adapt.
        common: Whether adapting newcomers changes what the other devices are served.
        noisy: Whether each new state is the release of a noisy sum, which is counted.
    """

    settings: RoundSettings
    policy: Policy
    common: bool = False
    noisy: bool = False


class PhaseKey(StrEnum):
    """The phases, with adaptation apart from training: the record calls both `training`."""

    WAITING = "waiting"
    TRAINING = "training"
    ADAPTATION = "adaptation"
    AGGREGATING = "aggregating"
    EVALUATION = "evaluation"
    DONE = "done"
    FAILED = "failed"


def phase_of(record: Record) -> PhaseKey:
    """Return the phase that a record is in."""
    match record.phase:
        case Phase.TRAINING if record.adapting:
            return PhaseKey.ADAPTATION
        case Phase.EVALUATING:
            return PhaseKey.EVALUATION
        case phase:
            return PhaseKey(phase)


class Step(msgspec.Struct, frozen=True):
    """The outcome of one event: the next state, the effects to carry out, and the phase to enter next (None: no change)."""

    state: Round
    effects: tuple[Effect, ...] = ()
    then: PhaseKey | None = None

    def after(self, *effects: Effect) -> Step:
        """Return this step with `effects` before its own."""
        return Step(self.state, (*effects, *self.effects), self.then)


class PhaseVerbs:
    """One phase: a verb for each kind of event. By default a verb changes nothing. `now` is monotonic seconds."""

    def enter(self, rules: Rules, state: Round, now: float) -> Step:
        """Enter from another phase."""
        return Step(state)

    def resume(self, rules: Rules, state: Round, now: float) -> Step:
        """Continue in a new process, after a restart or a failure."""
        return Step(state)

    def connect(self, rules: Rules, state: Round, name: str, now: float) -> Step:
        """Serve a device that has just connected; `state.connected` contains it already."""
        return Step(state)

    def report(self, rules: Rules, state: Round, event: Reported) -> Step:
        """Take in an answer that is durable in the inbox. By default it is late, unless it was counted before."""
        return Step(state, (Acknowledge(event.name, was_counted(state, event)),))

    def progress(self, rules: Rules, state: Round, now: float) -> Step:
        """Close what is open if its time has come: called when time has passed or the state has changed."""
        return Step(state)

    def unpaused(self, rules: Rules, state: Round, now: float) -> Step:
        """Open rounds again after a pause."""
        return Step(state)

    def aggregated(self, rules: Rules, state: Round, event: Aggregated) -> Step:
        """Go on from the new state of the model."""
        return Step(state)


class OpenPhase(PhaseVerbs):
    """A phase in which orders are out."""

    def resume(self, rules: Rules, state: Round, now: float) -> Step:
        return self.progress(rules, state, now).after(*sent_again(state, state.awaited & state.connected))

    def connect(self, rules: Rules, state: Round, name: str, now: float) -> Step:
        return self.progress(rules, state, now).after(*sent_again(state, {name} & state.awaited))

    def report(self, rules: Rules, state: Round, event: Reported) -> Step:
        if not rules.policy.worth(state, event.work, event.round, event.name) > 0:
            return super().report(rules, state, event)
        answered = state.answering(event.name, event.now, event.loss)
        return self.progress(rules, answered, event.now).after(Acknowledge(event.name, accepted=True))


def sent_again(state: Round, names: Collection[str]) -> tuple[Open, ...]:
    """Return the effects that send these devices the orders that they hold."""
    orders = [state.record.order_of(name) for name in sorted(names)]
    kinds = sorted({(order.work, order.round) for order in orders})
    return tuple(Open(*kind, tuple(order.client for order in orders if (order.work, order.round) == kind)) for kind in kinds)


def closing(rules: Rules, state: Round, now: float) -> Round:
    """Return the state of a step that closes now, with what it says about the devices: missed orders and durations."""
    return state.running_out(rules.policy.overdue(state, now), rules.policy.slow(state)).pacing()


def was_counted(state: Round, event: Reported) -> bool:
    """Return whether this answer was taken in already, for the open orders or for the round that was closed last."""
    order, name, record = (event.work, event.round), event.name, state.record
    last = name in record.last_cohort and order == ("train", record.last_begun.get(name, record.round))
    return last or (order == record.open_orders and name in state.reported)


class TrainingPhase(OpenPhase):
    """A cohort trains. The round closes when the policy says so."""

    def enter(self, rules: Rules, state: Round, now: float) -> Step:
        asked = rules.policy.ask(state)
        opened = state.ordering(Phase.TRAINING, asked.devices, asked.cohort, now, rules.settings.deadline_s)
        if not asked.devices:  # the draw took no device
            return self.progress(rules, opened, now)
        return Step(opened, (Open("train", state.record.round + 1, asked.devices),))

    def progress(self, rules: Rules, state: Round, now: float) -> Step:
        complete = rules.policy.complete(state, now)
        if back := spoiled(state, rules.settings.take_back, complete=complete):
            return Step(state.noting(spoiled=back.why, back_to=back.to), then=PhaseKey.AGGREGATING)
        if complete:
            return Step(closing(rules, state, now), then=PhaseKey.AGGREGATING)
        if rules.policy.extends(state, now):
            return self._extend(rules, state.running_out(rules.policy.overdue(state, now)), now)
        return self._replace(rules, state, now)

    def _extend(self, rules: Rules, state: Round, now: float) -> Step:
        """Restart the deadline of a round that lacks its quorum, ask devices that came since, and those in trouble again."""
        asked = rules.policy.ask_again(state)
        joined = state.joining(asked - frozenset(state.record.devices), now)
        extended = joined.extending(asked, now, rules.settings.deadline_s)
        orders = (Open("train", state.record.round + 1, tuple(sorted(asked))),) if asked else ()
        return Step(extended, orders)

    def _replace(self, rules: Rules, state: Round, now: float) -> Step:
        """Give the places of absent devices to idle ones."""
        pairs = rules.policy.replacements(state, now)
        if not pairs:
            return Step(state)
        gone, others = {gone for gone, _ in pairs}, tuple(sorted(other for _, other in pairs))
        return Step(state.leaving(gone).joining(others, now), (Open("train", state.record.round + 1, others),))


class AdaptationPhase(OpenPhase):
    """Newcomers to a finished federation train in rounds of their own."""

    def enter(self, rules: Rules, state: Round, now: float) -> Step:
        """Open the newcomers' next round, or their evaluation once each has had its rounds.

        Further newcomers may join until the first of them is through, so that an adaptation ends however many come.
        """
        counts, rounds = dict(state.record.adapting), rules.settings.adapt_rounds
        if all(count < rounds for count in counts.values()):
            counts |= dict.fromkeys(sorted(state.newcomers - counts.keys()), 0)
            state = replace(state, finished=state.finished - counts.keys())
        cohort = tuple(sorted(name for name, count in counts.items() if count < rounds))
        state = state.noting(adapting=counts)
        if not cohort:
            return Step(state, then=PhaseKey.EVALUATION)
        opened = state.ordering(Phase.TRAINING, cohort, cohort, now, rules.settings.deadline_s)
        orders = tuple(sorted(state.connected.intersection(cohort)))
        return self.progress(rules, opened, now).after(Open("train", state.record.round + 1, orders))

    def connect(self, rules: Rules, state: Round, name: str, now: float) -> Step:
        if name not in state.awaited and name in state.finished - state.newcomers:
            return Step(state, (FinishDevices((name,)),))
        return super().connect(rules, state, name, now)

    def progress(self, rules: Rules, state: Round, now: float) -> Step:
        complete = rules.policy.complete(state, now)
        # A newcomer that leaves does not delay the others: when it comes back, it is a newcomer again.
        if not complete and not rules.policy.over(state, now):
            return Step(state)
        then = PhaseKey.AGGREGATING if complete else PhaseKey.EVALUATION
        return Step(closing(rules, state, now), then=then)


class EvaluationPhase(OpenPhase):
    """Devices evaluate the new state. There is a deadline and no quorum."""

    def enter(self, rules: Rules, state: Round, now: float) -> Step:
        """Order the evaluation.

        After an adaptation only the newcomers evaluate, and the devices that have connected since to fetch the state.
        """
        adapting = frozenset(state.record.adapting)
        come = state.connected - state.finished - state.newcomers
        devices = adapting | come if adapting else rules.policy.ask_to_evaluate(state)
        opened = state.ordering(Phase.EVALUATING, devices, (), now, rules.settings.deadline_s)
        orders = tuple(sorted(devices & state.connected))
        return self.progress(rules, opened, now).after(Open("evaluate", state.record.round, orders))

    def connect(self, rules: Rules, state: Round, name: str, now: float) -> Step:
        if name not in state.awaited and state.record.adapting and name in state.finished - state.newcomers:
            return Step(state, (FinishDevices((name,)),))
        return super().connect(rules, state, name, now)

    def progress(self, rules: Rules, state: Round, now: float) -> Step:
        if not rules.policy.over(state, now):
            return Step(state)
        if back := spoiled(state, rules.settings.take_back, complete=False):
            return Step(state.noting(spoiled=back.why, back_to=back.to), then=PhaseKey.AGGREGATING)
        over = state.record.round >= (state.record.last or rules.settings.rounds)
        then = PhaseKey.DONE if over else PhaseKey.WAITING
        return Step(closing(rules, state, now), then=then)


class WaitingPhase(PhaseVerbs):
    """No round can open: too few devices are connected, or the operator has paused the federation."""

    def enter(self, rules: Rules, state: Round, now: float) -> Step:
        waiting = state.noting(phase=Phase.WAITING)
        opens = rules.policy.opens(waiting) and not waiting.record.paused
        first = PhaseKey.TRAINING if rules.settings.rounds else PhaseKey.EVALUATION
        return Step(waiting, then=first if opens else None)

    def resume(self, rules: Rules, state: Round, now: float) -> Step:
        return self.enter(rules, state, now)

    def unpaused(self, rules: Rules, state: Round, now: float) -> Step:
        return self.enter(rules, state, now)

    def connect(self, rules: Rules, state: Round, name: str, now: float) -> Step:
        return self.enter(rules, state, now)


class AggregatingPhase(PhaseVerbs):
    """The updates of the closed round become the next state."""

    def enter(self, rules: Rules, state: Round, now: float) -> Step:
        closed, number = state.noting(phase=Phase.AGGREGATING), state.record.round + 1
        if state.record.spoiled:
            return Step(closed, (GoBack(number, state.record.back_to, state.record.spoiled),))
        return Step(closed, (Aggregate(number, tuple(sorted(state.updates))),))

    def resume(self, rules: Rules, state: Round, now: float) -> Step:
        return self.enter(rules, state, now)

    def aggregated(self, rules: Rules, state: Round, event: Aggregated) -> Step:
        record, number, setback = state.record, state.record.round + 1, event.setback
        counted = NOBODY if setback else state.updates
        loss = record.loss if setback else median_loss(state)
        back, timed = bool(record.spoiled), event.now > 0  # the clock of a simulation stands: its bits depend on no time
        state = replace(
            state.noting(
                round=number,
                last_cohort=tuple(sorted(counted)),
                loss=record.loss if loss is None else loss,
                earlier=_earlier(rules.settings, record, setback, median_loss(state)),
                given_up=record.round if back else record.given_up,
                taken_back=tuple(n for n in record.taken_back if n > number - WINDOW) + (number,) * back,
                taken_back_at=(record.taken_back_at + (state.unix,) * (back and timed))[-TAKE_BACKS:],
                spoiled="",
                attempt=0,
                fixed=None,
                weights={**record.weights, number: event.weight} if event.weight else record.weights,
                summed=event.summed or record.summed,
                likeliest=event.likeliest,
                last=event.last,
                releases=record.releases + (rules.noisy and not setback),
                setback=f"round {number}: {setback}" if setback else record.setback,
            ),
            newcomers=state.newcomers - counted,
        )
        if record.adapting:
            counts = {name: count + (name in record.devices) for name, count in record.adapting.items()}
            # If the adaptation changed what the other devices are served, these evaluate it when they come back.
            finished = NOBODY if rules.common else state.finished
            return Step(replace(state.noting(adapting=counts), finished=finished), then=PhaseKey.ADAPTATION)
        evaluated = rules.policy.evaluates(state.record.round, state.record.last)
        return Step(state, then=PhaseKey.EVALUATION if evaluated else PhaseKey.WAITING)


def _earlier(settings: RoundSettings, record: Record, setback: str, loss: float | None) -> tuple[EarlierState, ...]:
    """Return the states that are kept after a round, from the record before it.

    Args:
        settings: They say how many are kept.
        record: The record.
        setback: Why no update of the round counts; empty: they do.
        loss: The median of the losses that the round's devices reported for the state before it.
    """
    if record.spoiled:
        states = tuple(state for state in record.earlier if state.round < record.back_to)
    else:
        states = record.earlier if setback else (*record.earlier, EarlierState(record.round, loss))
    most = settings.keep_states if settings.take_back else 1
    return tuple(state for state in states if state.round > record.round + 1 - WINDOW)[-most:]


class DonePhase(PhaseVerbs):
    """All rounds are closed. Devices that connect now are served; newcomers are adapted where that is set."""

    def enter(self, rules: Rules, state: Round, now: float) -> Step:
        # A device that had its rounds is no longer a newcomer, even if no update of it counted. Otherwise it would be
        # adapted again and again.
        newcomers = state.newcomers - state.record.adapting.keys()
        through = state.reported - newcomers
        done = state.noting(phase=Phase.DONE, adapting={}, earlier=state.record.earlier[-1:])
        state = replace(done, newcomers=newcomers, finished=state.finished | through)
        served = self._serve_late(state, state.connected - state.finished)
        return served.after(FinishDevices(tuple(sorted(through & state.connected))))

    def resume(self, rules: Rules, state: Round, now: float) -> Step:
        return self._serve_late(state, state.connected)

    def connect(self, rules: Rules, state: Round, name: str, now: float) -> Step:
        return self._serve_late(state, (name,))

    def unpaused(self, rules: Rules, state: Round, now: float) -> Step:
        return self._serve_late(state, ())

    def report(self, rules: Rules, state: Round, event: Reported) -> Step:
        name = event.name
        if not rules.policy.worth(state, event.work, event.round, name) > 0:
            return super().report(rules, state, event)
        state = replace(state.answering(name, event.now), finished=state.finished | {name})
        return Step(state, (Acknowledge(name, accepted=True), FinishDevices((name,))))

    def _serve_late(self, state: Round, names: Collection[str]) -> Step:
        """Adapt newcomers first, unless the federation is paused; let every other device evaluate once, then dismiss it."""
        if state.newcomers and not state.record.paused:
            return Step(state, then=PhaseKey.ADAPTATION)
        present = frozenset(names) - state.newcomers
        through = tuple(sorted(state.finished & present))
        late = tuple(sorted(present - state.finished))
        effects: list[Effect] = [FinishDevices(through)] if through else []
        if late:
            state = state.noting(devices=tuple(sorted({*state.record.devices, *late})))
            effects.append(Open("evaluate", state.record.round, late))
        return Step(state, tuple(effects))


class FailedPhase(PhaseVerbs):
    """A step could not be carried out. It is tried again when the round is resumed."""

    def report(self, rules: Rules, state: Round, event: Reported) -> Step:
        """Keep an answer to the open orders: it is in the inbox, and counts when the step is tried again."""
        is_open = state.record.failed_in in (Phase.TRAINING, Phase.EVALUATING)
        if is_open and rules.policy.worth(state, event.work, event.round, event.name) > 0:
            return Step(state.answering(event.name, event.now, event.loss), (Acknowledge(event.name, accepted=True),))
        return super().report(rules, state, event)


PHASES: dict[PhaseKey, PhaseVerbs] = {
    PhaseKey.WAITING: WaitingPhase(),
    PhaseKey.TRAINING: TrainingPhase(),
    PhaseKey.ADAPTATION: AdaptationPhase(),
    PhaseKey.AGGREGATING: AggregatingPhase(),
    PhaseKey.EVALUATION: EvaluationPhase(),
    PhaseKey.DONE: DonePhase(),
    PhaseKey.FAILED: FailedPhase(),
}
