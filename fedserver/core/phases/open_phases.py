"""Phases in which orders are out: training, adaptation of newcomers, and evaluation."""

from __future__ import annotations

from msgspec.structs import replace

from attune.fedserver.core.messages import FinishDevices, Open, Phase
from attune.fedserver.core.phases.base import OpenPhase, PhaseKey, Rules, Step
from attune.fedserver.core.policy import spoiled
from attune.fedserver.core.state import Round


class TrainingPhase(OpenPhase):
    """A cohort trains. The round closes when the policy says so."""

    def enter(self, rules: Rules, state: Round, now: float) -> Step:
        asked = rules.policy.ask(state)
        opened = state.ordering(Phase.TRAINING, asked.devices, asked.cohort, now, rules.settings.deadline_s)
        return Step(opened, (Open("train", state.record.round + 1, asked.devices),))

    def progress(self, rules: Rules, state: Round, now: float) -> Step:
        complete = rules.policy.complete(state, now)
        if why := spoiled(state, rules.settings.take_back, complete=complete):
            return Step(state.noting(spoiled=why), then=PhaseKey.AGGREGATING)
        if complete:
            return Step(state.running_out(rules.policy.overdue(state, now)), then=PhaseKey.AGGREGATING)
        if rules.policy.extends(state, now):
            return self._extend(rules, state.running_out(rules.policy.overdue(state, now)), now)
        return self._replace(rules, state, now)

    def _extend(self, rules: Rules, state: Round, now: float) -> Step:
        """Restart the deadline of a round that lacks its quorum, let newcomers join, and retry the devices in trouble."""
        asked = rules.policy.ask_again(state)
        joined = state.joining(asked - frozenset(state.record.devices), now)
        extended = joined.extending(asked, now, rules.settings.deadline_s)
        orders = (Open("train", state.record.round + 1, tuple(sorted(asked))),) if asked else ()
        return Step(extended, orders)

    def _replace(self, rules: Rules, state: Round, now: float) -> Step:
        """Give the places of absent devices to idle ones."""
        pairs = rules.policy.replacements(state, now)
        if not pairs:
            return Step(state)
        gone, others = {gone for gone, _ in pairs}, tuple(sorted(other for _, other in pairs))
        return Step(state.leaving(gone).joining(others, now), (Open("train", state.record.round + 1, others),))


class AdaptationPhase(OpenPhase):
    """Newcomers to a finished federation train in rounds of their own."""

    def enter(self, rules: Rules, state: Round, now: float) -> Step:
        """Open the newcomers' next round, or their evaluation once each has had its rounds.

        Further newcomers may join until the first of them is through, so that an adaptation ends however many come.
        """
        counts, rounds = dict(state.record.adapting), rules.settings.adapt_rounds
        if all(count < rounds for count in counts.values()):
            counts |= dict.fromkeys(sorted(state.newcomers - counts.keys()), 0)
            state = replace(state, finished=state.finished - counts.keys())
        cohort = tuple(sorted(name for name, count in counts.items() if count < rounds))
        state = state.noting(adapting=counts)
        if not cohort:
            return Step(state, then=PhaseKey.EVALUATION)
        opened = state.ordering(Phase.TRAINING, cohort, cohort, now, rules.settings.deadline_s)
        orders = tuple(sorted(state.connected.intersection(cohort)))
        return self.progress(rules, opened, now).after(Open("train", state.record.round + 1, orders))

    def connect(self, rules: Rules, state: Round, name: str, now: float) -> Step:
        if name not in state.awaited and name in state.finished - state.newcomers:
            return Step(state, (FinishDevices((name,)),))
        return super().connect(rules, state, name, now)

    def progress(self, rules: Rules, state: Round, now: float) -> Step:
        complete = rules.policy.complete(state, now)
        # A newcomer that leaves does not delay the others: when it comes back, it is a newcomer again.
        if not complete and not rules.policy.over(state, now):
            return Step(state)
        then = PhaseKey.AGGREGATING if complete else PhaseKey.EVALUATION
        return Step(state.running_out(rules.policy.overdue(state, now)), then=then)


class EvaluationPhase(OpenPhase):
    """Devices evaluate the new state. There is a deadline and no quorum."""

    def enter(self, rules: Rules, state: Round, now: float) -> Step:
        """Order the evaluation.

        After an adaptation only the newcomers evaluate, and the devices that have connected since to fetch the state.
        """
        adapting = frozenset(state.record.adapting)
        come = state.connected - state.finished - state.newcomers
        devices = adapting | come if adapting else rules.policy.ask_to_evaluate(state)
        opened = state.ordering(Phase.EVALUATING, devices, (), now, rules.settings.deadline_s)
        orders = tuple(sorted(devices & state.connected))
        return self.progress(rules, opened, now).after(Open("evaluate", state.record.round, orders))

    def connect(self, rules: Rules, state: Round, name: str, now: float) -> Step:
        if name not in state.awaited and state.record.adapting and name in state.finished - state.newcomers:
            return Step(state, (FinishDevices((name,)),))
        return super().connect(rules, state, name, now)

    def progress(self, rules: Rules, state: Round, now: float) -> Step:
        if not rules.policy.over(state, now):
            return Step(state)
        if why := spoiled(state, rules.settings.take_back, complete=False):
            return Step(state.noting(spoiled=why), then=PhaseKey.AGGREGATING)
        closed = state.running_out(rules.policy.overdue(state, now))
        return Step(closed, then=PhaseKey.WAITING if state.record.round < rules.settings.rounds else PhaseKey.DONE)
