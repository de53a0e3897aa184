"""Waiting: no round can open, for want of devices."""

from __future__ import annotations

from attune.fedserver.core.messages import Phase
from attune.fedserver.core.phases.base import PhaseVerbs, Rules, Stage, Step
from attune.fedserver.core.state import Round


class Waiting(PhaseVerbs):
    def enter(self, rules: Rules, state: Round, now: float) -> Step:
        waiting = state.noting(phase=Phase.WAITING)
        return Step(waiting, then=Stage.TRAINING if rules.policy.opens(waiting) else None)

    def resume(self, rules: Rules, state: Round, now: float) -> Step:
        return self.enter(rules, state, now)

    def connect(self, rules: Rules, state: Round, name: str, now: float) -> Step:
        return self.enter(rules, state, now)
