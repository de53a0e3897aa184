"""Done: all rounds are closed. Who comes now is served, and newcomers are adapted where that is set."""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from attune.fedserver.core.messages import Acknowledge, Effect, Finish, Open, Phase, Reported
from attune.fedserver.core.phases.base import PhaseVerbs, Rules, Stage, Step
from attune.fedserver.core.state import Round


class Done(PhaseVerbs):
    def enter(self, rules: Rules, state: Round, now: float) -> Step:
        # Who was given its rounds is a newcomer no longer, also if none of its updates could be used: or it would be adapted
        # for ever.
        newcomers = state.newcomers - state.record.adapting.keys()
        told = state.reported - newcomers
        state = replace(state.noting(phase=Phase.DONE, adapting={}), newcomers=newcomers, finished=state.finished | told)
        served = self._serve_late(state, state.connected - state.finished)
        return served.after(Finish(tuple(sorted(told & state.connected))))

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
        return Step(state, (Acknowledge(name, accepted=True), Finish((name,))))

    def _serve_late(self, state: Round, names: Collection[str]) -> Step:
        """Newcomers are adapted first; everyone else evaluates once and is told to go. While it is paused, newcomers wait."""
        if state.newcomers and not state.record.paused:
            return Step(state, then=Stage.ADAPTATION)
        present = frozenset(names) - state.newcomers
        told = tuple(sorted(state.finished & present))
        late = tuple(sorted(present - state.finished))
        effects: list[Effect] = [Finish(told)] if told else []
        if late:
            state = state.noting(devices=tuple(sorted({*state.record.devices, *late})))
            effects.append(Open("evaluate", state.record.round, late))
        return Step(state, tuple(effects))
