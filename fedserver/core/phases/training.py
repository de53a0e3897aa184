"""Training: a cohort holds orders, and the round closes when the policy says so."""

from __future__ import annotations

from attune.fedserver.core import health
from attune.fedserver.core.messages import Open, Phase
from attune.fedserver.core.phases.base import OpenPhase, Rules, Stage, Step
from attune.fedserver.core.state import Round


class Training(OpenPhase):
    def enter(self, rules: Rules, state: Round, now: float) -> Step:
        asked = rules.policy.ask(state)
        opened = state.ordering(Phase.TRAINING, asked.devices, asked.cohort, now, rules.settings.deadline_s)
        return Step(opened, (Open("train", state.record.round + 1, asked.devices),))

    def progress(self, rules: Rules, state: Round, now: float) -> Step:
        complete = rules.policy.complete(state, now)
        if why := health.spoiled(state, rules.settings.take_back, complete=complete):
            return Step(state.noting(spoiled=why), then=Stage.AGGREGATING)
        if complete:
            return Step(state.running_out(rules.policy.overdue(state, now)), then=Stage.AGGREGATING)
        if rules.policy.extends(state, now):
            return self._extend(rules, state.running_out(rules.policy.overdue(state, now)), now)
        return self._replace(rules, state, now)

    def _extend(self, rules: Rules, state: Round, now: float) -> Step:
        """Without a quorum nothing is lost: newcomers join, the troubled try again, the clock starts anew."""
        asked = rules.policy.ask_again(state)
        joined = state.joining(asked - frozenset(state.record.devices), now)
        extended = joined.extending(asked, now, rules.settings.deadline_s)
        orders = (Open("train", state.record.round + 1, tuple(sorted(asked))),) if asked else ()
        return Step(extended, orders)

    def _replace(self, rules: Rules, state: Round, now: float) -> Step:
        """Idle devices take the places of those that stay away."""
        pairs = rules.policy.replacements(state, now)
        if not pairs:
            return Step(state)
        gone, others = {gone for gone, _ in pairs}, tuple(sorted(other for _, other in pairs))
        return Step(state.leaving(gone).joining(others, now), (Open("train", state.record.round + 1, others),))
