"""Aggregating: the updates of the closed round are made into the next state."""

from __future__ import annotations

from msgspec.structs import replace

from attune.fedserver.core.health import median_of
from attune.fedserver.core.messages import Aggregate, GoBack, Phase
from attune.fedserver.core.phases.base import PhaseVerbs, Rules, Stage, Step
from attune.fedserver.core.state import NOBODY, Round


class Aggregating(PhaseVerbs):
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
        loss = record.loss if setback else median_of(state)
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
            given = {name: count + (name in record.devices) for name, count in record.adapting.items()}
            # Where what the others are served has changed, who comes back evaluates it.
            finished = NOBODY if rules.common else state.finished
            return Step(replace(state.noting(adapting=given), finished=finished), then=Stage.ADAPTATION)
        evaluated = rules.policy.evaluates(state.record.round)
        return Step(state, then=Stage.EVALUATION if evaluated else Stage.WAITING)
