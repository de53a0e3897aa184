"""The rules of a round, the outcome of a step, and the verbs that every phase implements."""

from __future__ import annotations

from dataclasses import dataclass

from attune.common.config import RoundSettings
from attune.fedserver.core.messages import Acknowledge, Effect, Open, Phase, Record, Reported, StrEnum
from attune.fedserver.core.policy import Policy
from attune.fedserver.core.state import Round


@dataclass(frozen=True)
class Rules:
    """Rules that stay the same while a process lives.

    Attributes:
        settings: `adapt_rounds` must be 0 for a method that has nothing to adapt.
        common: Whether adapting newcomers changes what the other devices are served.
    """

    settings: RoundSettings
    policy: Policy
    common: bool = False


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


@dataclass(frozen=True)
class Step:
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

    def aggregated(self, rules: Rules, state: Round, now: float, setback: str) -> Step:
        """Go on from the new state of the model. setback: why it is not made from the cohort's updates; empty if it is."""
        return Step(state)


class OpenPhase(PhaseVerbs):
    """A phase in which orders are out."""

    def resume(self, rules: Rules, state: Round, now: float) -> Step:
        orders = tuple(sorted(state.awaited & state.connected))
        effects = (Open(*state.record.open_orders, orders),) if orders else ()
        return self.progress(rules, state, now).after(*effects)

    def connect(self, rules: Rules, state: Round, name: str, now: float) -> Step:
        if name in state.awaited:
            return Step(state, (Open(*state.record.open_orders, (name,)),))
        return self.progress(rules, state, now)

    def report(self, rules: Rules, state: Round, event: Reported) -> Step:
        if not rules.policy.worth(state, event.work, event.round, event.name) > 0:
            return super().report(rules, state, event)
        answered = state.answering(event.name, event.now, event.loss)
        return self.progress(rules, answered, event.now).after(Acknowledge(event.name, accepted=True))


def was_counted(state: Round, event: Reported) -> bool:
    """Return whether this answer was taken in already, for the open orders or for the round that was closed last."""
    order, record = (event.work, event.round), state.record
    again = order == record.open_orders and event.name in state.reported
    return again or (order == ("train", record.round) and event.name in record.last_cohort)
