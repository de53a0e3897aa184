"""What every phase of a round has in common: the rules, the outcome of a step, and the verbs."""

from __future__ import annotations

from dataclasses import dataclass

from attune.common.config import RoundSettings
from attune.fedserver.core.enums import StrEnum
from attune.fedserver.core.messages import Acknowledge, Effect, Open, Phase, Record, Reported
from attune.fedserver.core.policy import Policy
from attune.fedserver.core.state import Round


@dataclass(frozen=True)
class Rules:
    """What does not change while a process lives. adapt_rounds in `settings` must be 0 where there is nothing to adapt.

    common: whether adapting newcomers changes what everybody is served.
    """

    settings: RoundSettings
    policy: Policy
    common: bool = False


class Stage(StrEnum):
    """The phases, of which the record calls two `training`."""

    WAITING = "waiting"
    TRAINING = "training"
    ADAPTATION = "adaptation"
    AGGREGATING = "aggregating"
    EVALUATION = "evaluation"
    DONE = "done"
    FAILED = "failed"


def stage_of(record: Record) -> Stage:
    match record.phase:
        case Phase.TRAINING if record.adapting:
            return Stage.ADAPTATION
        case Phase.EVALUATING:
            return Stage.EVALUATION
        case phase:
            return Stage(phase)


@dataclass(frozen=True)
class Step:
    """The next state, what is to be done, and which phase is entered after it (none: the state stays in its phase)."""

    state: Round
    effects: tuple[Effect, ...] = ()
    then: Stage | None = None

    def after(self, *effects: Effect) -> Step:
        """The same, with `effects` before its own."""
        return Step(self.state, (*effects, *self.effects), self.then)


class PhaseVerbs:
    """One phase. A verb that it does not have changes nothing. `now` is monotonic seconds."""

    def enter(self, rules: Rules, state: Round, now: float) -> Step:
        """Comes from another phase."""
        return Step(state)

    def resume(self, rules: Rules, state: Round, now: float) -> Step:
        """A process has taken the state up again, after a restart or a failure."""
        return Step(state)

    def connect(self, rules: Rules, state: Round, name: str, now: float) -> Step:
        """A device has connected; it is among the connected already."""
        return Step(state)

    def report(self, rules: Rules, state: Round, event: Reported) -> Step:
        """A device's answer is in the inbox. Where none is taken in, one that was counted hears again that it was."""
        return Step(state, (Acknowledge(event.name, was_counted(state, event)),))

    def progress(self, rules: Rules, state: Round, now: float) -> Step:
        """Time has passed, or something has changed: closes what is open if its time has come."""
        return Step(state)

    def unpaused(self, rules: Rules, state: Round, now: float) -> Step:
        """Rounds may open again."""
        return Step(state)

    def aggregated(self, rules: Rules, state: Round, now: float, setback: str) -> Step:
        """The next state of the model is there. setback: why it is not made of the cohort's updates; empty: it is."""
        return Step(state)


class OpenPhase(PhaseVerbs):
    """One in which orders are out."""

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
    """Whether this answer is one of those that were taken in: for the open orders, or for the round closed last."""
    order, record = (event.work, event.round), state.record
    again = order == record.open_orders and event.name in state.reported
    return again or (order == ("train", record.round) and event.name in record.last_cohort)
