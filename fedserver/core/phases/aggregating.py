"""Aggregating: the updates of the closed round are made into the next state."""

from __future__ import annotations

from dataclasses import replace

from attune.fedserver.core.messages import Aggregate, Phase
from attune.fedserver.core.phases.base import PhaseVerbs, Rules, Stage, Step
from attune.fedserver.core.state import NOBODY, Round


class Aggregating(PhaseVerbs):
    def enter(self, rules: Rules, state: Round, now: float) -> Step:
        closed = state.noting(phase=Phase.AGGREGATING)
        return Step(closed, (Aggregate(state.record.round + 1, tuple(sorted(state.updates))),))

    def resume(self, rules: Rules, state: Round, now: float) -> Step:
        return self.enter(rules, state, now)

    def aggregated(self, rules: Rules, state: Round, now: float) -> Step:
        record = state.record
        state = replace(
            state.noting(round=record.round + 1, last_cohort=tuple(sorted(state.updates))),
            newcomers=state.newcomers - state.updates,
        )
        if record.adapting:
            given = {name: count + (name in record.devices) for name, count in record.adapting.items()}
            # Where what the others are served has changed, who comes back evaluates it.
            finished = NOBODY if rules.common else state.finished
            return Step(replace(state.noting(adapting=given), finished=finished), then=Stage.ADAPTATION)
        evaluated = rules.policy.evaluates(state.record.round)
        return Step(state, then=Stage.EVALUATION if evaluated else Stage.WAITING)
