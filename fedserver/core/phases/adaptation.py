"""Adaptation: newcomers to a finished federation are given rounds of their own, with a cohort of newcomers only."""

from __future__ import annotations

from msgspec.structs import replace

from attune.fedserver.core.messages import Finish, Open, Phase
from attune.fedserver.core.phases.base import OpenPhase, Rules, Stage, Step
from attune.fedserver.core.state import Round


class Adaptation(OpenPhase):
    def enter(self, rules: Rules, state: Round, now: float) -> Step:
        """The next round of the newcomers, or their evaluation when each was given its rounds.

        Others may join until the first is through, so that an adaptation has an end however many come.
        """
        given, rounds = dict(state.record.adapting), rules.settings.adapt_rounds
        if all(count < rounds for count in given.values()):
            given |= dict.fromkeys(sorted(state.newcomers - given.keys()), 0)
            state = replace(state, finished=state.finished - given.keys())
        cohort = tuple(sorted(name for name, count in given.items() if count < rounds))
        state = state.noting(adapting=given)
        if not cohort:
            return Step(state, then=Stage.EVALUATION)
        opened = state.ordering(Phase.TRAINING, cohort, cohort, now, rules.settings.deadline_s)
        orders = tuple(sorted(state.connected.intersection(cohort)))
        return self.progress(rules, opened, now).after(Open("train", state.record.round + 1, orders))

    def connect(self, rules: Rules, state: Round, name: str, now: float) -> Step:
        if name not in state.awaited and name in state.finished - state.newcomers:
            return Step(state, (Finish((name,)),))
        return super().connect(rules, state, name, now)

    def progress(self, rules: Rules, state: Round, now: float) -> Step:
        complete = rules.policy.complete(state, now)
        # Newcomers that went away hold nobody up: who comes back is a newcomer again.
        if not complete and not rules.policy.over(state, now):
            return Step(state)
        then = Stage.AGGREGATING if complete else Stage.EVALUATION
        return Step(state.running_out(rules.policy.overdue(state, now)), then=then)
