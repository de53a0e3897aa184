"""Phases between and after rounds: waiting, aggregating, done and failed."""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from attune.fedserver.core.messages import Acknowledge, Aggregate, Effect, FinishDevices, GoBack, Open, Phase, Reported
from attune.fedserver.core.phases.base import PhaseKey, PhaseVerbs, Rules, Step
from attune.fedserver.core.policy import median_loss
from attune.fedserver.core.state import NOBODY, Round


class WaitingPhase(PhaseVerbs):
    """No round can open: too few devices are connected, or the operator has paused the federation."""

    def enter(self, rules: Rules, state: Round, now: float) -> Step:
        waiting = state.noting(phase=Phase.WAITING)
        opens = rules.policy.opens(waiting) and not waiting.record.paused
        return Step(waiting, then=PhaseKey.TRAINING if opens else None)

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
            return Step(closed, (GoBack(number, state.record.spoiled),))
        return Step(closed, (Aggregate(number, tuple(sorted(state.updates))),))

    def resume(self, rules: Rules, state: Round, now: float) -> Step:
        return self.enter(rules, state, now)

    def aggregated(self, rules: Rules, state: Round, now: float, setback: str) -> Step:
        record = state.record
        counted = NOBODY if setback else state.updates
        loss = record.loss if setback else median_loss(state)
        state = replace(
            state.noting(
                round=record.round + 1,
                last_cohort=tuple(sorted(counted)),
                loss=record.loss if loss is None else loss,
                kept=not setback,
                given_up=record.round if record.spoiled else record.given_up,
                spoiled="",
                setback=f"round {record.round + 1}: {setback}" if setback else record.setback,
            ),
            newcomers=state.newcomers - counted,
        )
        if record.adapting:
            counts = {name: count + (name in record.devices) for name, count in record.adapting.items()}
            # If the adaptation changed what the other devices are served, these evaluate it when they come back.
            finished = NOBODY if rules.common else state.finished
            return Step(replace(state.noting(adapting=counts), finished=finished), then=PhaseKey.ADAPTATION)
        evaluated = rules.policy.evaluates(state.record.round)
        return Step(state, then=PhaseKey.EVALUATION if evaluated else PhaseKey.WAITING)


class DonePhase(PhaseVerbs):
    """All rounds are closed. Devices that connect now are served; newcomers are adapted where that is set."""

    def enter(self, rules: Rules, state: Round, now: float) -> Step:
        # A device that had its rounds is no longer a newcomer, even if no update of it counted. Otherwise it would be
        # adapted again and again.
        newcomers = state.newcomers - state.record.adapting.keys()
        through = state.reported - newcomers
        state = replace(state.noting(phase=Phase.DONE, adapting={}), newcomers=newcomers, finished=state.finished | through)
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
