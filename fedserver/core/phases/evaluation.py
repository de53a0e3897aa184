"""Evaluation: devices say how good the new state is. It has a deadline and no quorum."""

from __future__ import annotations

from attune.fedserver.core import health
from attune.fedserver.core.messages import Finish, Open, Phase
from attune.fedserver.core.phases.base import OpenPhase, Rules, Stage, Step
from attune.fedserver.core.state import Round


class Evaluation(OpenPhase):
    def enter(self, rules: Rules, state: Round, now: float) -> Step:
        """After an adaptation only the newcomers evaluate, and those who have come meanwhile to fetch the state."""
        adapting = frozenset(state.record.adapting)
        come = state.connected - state.finished - state.newcomers
        devices = adapting | come if adapting else rules.policy.ask_to_evaluate(state)
        opened = state.ordering(Phase.EVALUATING, devices, (), now, rules.settings.deadline_s)
        orders = tuple(sorted(devices & state.connected))
        return self.progress(rules, opened, now).after(Open("evaluate", state.record.round, orders))

    def connect(self, rules: Rules, state: Round, name: str, now: float) -> Step:
        if name not in state.awaited and state.record.adapting and name in state.finished - state.newcomers:
            return Step(state, (Finish((name,)),))
        return super().connect(rules, state, name, now)

    def progress(self, rules: Rules, state: Round, now: float) -> Step:
        if not rules.policy.over(state, now):
            return Step(state)
        if why := health.spoiled(state, rules.settings.take_back, complete=False):
            return Step(state.noting(spoiled=why), then=Stage.AGGREGATING)
        closed = state.running_out(rules.policy.overdue(state, now))
        return Step(closed, then=Stage.WAITING if state.record.round < rules.settings.rounds else Stage.DONE)
