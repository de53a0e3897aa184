"""Failed: the step under way could not be carried out. It is tried again when the round is resumed."""

from __future__ import annotations

from attune.fedserver.core.messages import Acknowledge, Phase, Reported
from attune.fedserver.core.phases.base import PhaseVerbs, Rules, Step
from attune.fedserver.core.state import Round


class Failed(PhaseVerbs):
    def report(self, rules: Rules, state: Round, event: Reported) -> Step:
        """What answers the orders that are out lies in the inbox, and counts when the step is tried again."""
        is_open = state.record.failed_in in (Phase.TRAINING, Phase.EVALUATING)
        if is_open and rules.policy.worth(state, event.work, event.round, event.name) > 0:
            return Step(state.answering(event.name, event.now, event.loss), (Acknowledge(event.name, accepted=True),))
        return super().report(rules, state, event)
