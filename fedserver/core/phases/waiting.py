"""Waiting: no round can open, for want of devices, or because the operator has paused the federation."""

from __future__ import annotations

from attune.fedserver.core.messages import Phase
from attune.fedserver.core.phases.base import PhaseVerbs, Rules, Stage, Step
from attune.fedserver.core.state import Round


class Waiting(PhaseVerbs):
    def enter(self, rules: Rules, state: Round, now: float) -> Step:
        waiting = state.noting(phase=Phase.WAITING)
        opens = rules.policy.opens(waiting) and not waiting.record.paused
        return Step(waiting, then=Stage.TRAINING if opens else None)

    def resume(self, rules: Rules, state: Round, now: float) -> Step:
        return self.enter(rules, state, now)

    def unpaused(self, rules: Rules, state: Round, now: float) -> Step:
        return self.enter(rules, state, now)

    def connect(self, rules: Rules, state: Round, name: str, now: float) -> Step:
        return self.enter(rules, state, now)
