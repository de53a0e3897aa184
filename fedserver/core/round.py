"""The round as a pure function: (state, event) -> (state, effects). It reads no clock, opens no file and sees no tensor.

Phases: waiting -> training -> aggregating -> (evaluation ->) waiting | training ... -> done. Aggregating can also take
rounds back: an earlier state becomes the state again (`policy.spoiled`). Newcomers to a finished federation open further
rounds: done -> adaptation -> aggregating -> adaptation ... -> evaluation -> done. A failed round tries the same step again when
it is resumed.

States are immutable. A caller that cannot make a step durable keeps the state before it.
"""

from __future__ import annotations

from msgspec.structs import replace

from attune.fedserver.core import messages as events
from attune.fedserver.core.buffered_rounds import BUFFERED
from attune.fedserver.core.phases import PHASES, PhaseKey, PhaseVerbs, Rules, Step, phase_of
from attune.fedserver.core.policy import passed_over
from attune.fedserver.core.state import Round, forgiven, without


def step(rules: Rules, state: Round, event: events.Event, unix: float = 0.0) -> Step:
    """Apply one event, through all phases that it enters.

    Unknown and repeated events change nothing, so sending again is always safe. `unix`: unix time, only for display.
    """
    if isinstance(event, events.StepFailed):
        # After a second failure, the step to try again stays the same.
        return Step(state.noting(phase=events.Phase.FAILED, failed_in=state.record.revive().phase, reason=event.reason))
    outcome = _handle(rules, state.but(unix=unix, now=event.now), event)
    effects = outcome.effects
    while outcome.then is not None:
        outcome = _phase(rules, outcome.then).enter(rules, outcome.state, event.now)
        effects += outcome.effects
    return Step(outcome.state, (*_passed_over_changes(state, outcome.state), *effects))


def _passed_over_changes(before: Round, after: Round) -> tuple[events.Effect, ...]:
    """Return the effects that tell the operator which devices are passed over from now on, and which no longer."""
    if not any(before.missed.values()) and (after.missed is before.missed or not any(after.missed.values())):
        return ()
    were, are = passed_over(before), passed_over(after)
    only_were, only_are = passed_over(before, "evaluate") - were, passed_over(after, "evaluate") - are
    effects = (
        events.PassOver(tuple(sorted(are - were))),
        events.AskAgain(tuple(sorted(were - are))),
        events.PassOver(tuple(sorted(only_are - only_were - were)), "evaluate"),
        events.AskAgain(tuple(sorted(only_were - only_are - are)), "evaluate"),
    )
    return tuple(effect for effect in effects if effect.devices)


def next_wake(rules: Rules, state: Round, now: float) -> float | None:
    """Return when a Tick is due; None if no order is out, so that time alone changes nothing."""
    if state.record.phase not in (events.Phase.TRAINING, events.Phase.EVALUATING):
        return None
    return min([state.deadline, *(time for time in rules.policy.wakes(state) if time > now)])


def left_s(rules: Rules, state: Round, now: float) -> float:
    """Return the seconds that a device has for an order sent now.

    A latecomer after the end has the whole time, and so has a device in buffered rounds.
    """
    whole = state.record.phase is events.Phase.DONE or state.record.begun
    return rules.settings.deadline_s if whole else max(0.0, state.deadline - now)


def _phase(rules: Rules, key: PhaseKey) -> PhaseVerbs:
    return BUFFERED.get(key, PHASES[key]) if rules.settings.mode == "buffered" else PHASES[key]


def _handle(rules: Rules, state: Round, event: events.Event) -> Step:
    phase = _phase(rules, phase_of(state.record))
    match event:
        case events.Resumed(now):
            return _resume(rules, state, now)
        case events.Connected(name, now, _, empty):
            if empty and state.record.phase is events.Phase.DONE:  # it is served once more
                state = replace(state, finished=state.finished - {name}, reported=state.reported - {name})
            return phase.connect(rules, _entering(rules, state, event), name, now)
        case events.Disconnected(name, now):
            return phase.progress(rules, _leaving(state, name, now), now)
        case events.Reported(name, work=work):
            missed = forgiven(state.missed, name, work)
            return phase.report(rules, state if missed is state.missed else state.but(missed=missed), event)
        case events.DeviceProgressed(name, now):
            return phase.progress(rules, _moving(state, name, now), now)
        case events.Excused(name, now, troubled):
            return phase.progress(rules, state.excusing(name, troubled), now)
        case events.Expelled(name, now):
            return phase.progress(rules, state.expelling(name), now)
        case events.Paused(on, now):
            noted = state.noting(paused=on)
            return Step(noted) if on else phase.unpaused(rules, noted, now)
        case events.Tick(now):
            return phase.progress(rules, state, now)
        case events.Aggregated():
            return phase.aggregated(rules, state, event)
        case events.Attempted(_, attempt, fixed, cohort):
            return Step(state.noting(attempt=attempt, fixed=fixed, same_cohort=cohort or state.record.same_cohort))
        case events.Exchanged(_, kind, took, costs):
            return Step(state.exchanged(kind, took, costs))
        case events.StepFailed():
            raise AssertionError("handled before")


def _resume(rules: Rules, state: Round, now: float) -> Step:
    """Resume the open step. All times begin anew, since the process does not know the time before its start."""
    devices = frozenset(state.record.devices)
    state = replace(
        state,
        record=state.record.revive(),
        left_at=dict(state.left_at) | dict.fromkeys(devices - state.connected, now),
        moved_at=dict.fromkeys(devices, now),
        asked_at=dict.fromkeys(devices, now),
        charged_at=now,
        deadline=now + rules.settings.deadline_s,
    )
    return _phase(rules, phase_of(state.record)).resume(rules, state, now)


def _entering(rules: Rules, state: Round, event: events.Connected) -> Round:
    """Add a device that has connected. Its missed orders in a row are forgotten: it is alive."""
    name, now, newcomer = event.name, event.now, event.newcomer
    return replace(
        state,
        connected=state.connected | {name},
        outside=state.outside | {name} if event.outside else state.outside - {name},
        newcomers=state.newcomers | {name} if newcomer and rules.settings.adapt_rounds else state.newcomers,
        left_at=without(state.left_at, name),
        moved_at={**state.moved_at, name: now},
        missed=forgiven(state.missed, name, "train", "evaluate"),
    )


def _leaving(state: Round, name: str, now: float) -> Round:
    return replace(
        state,
        connected=state.connected - {name},
        newcomers=state.newcomers - {name},
        left_at={**state.left_at, name: now},
    )


def _moving(state: Round, name: str, now: float) -> Round:
    """Note progress. A device that was passed over gets orders again; a smaller count of missed orders stays."""
    aside = name in passed_over(state, state.work)
    missed = forgiven(state.missed, name, state.work) if aside else state.missed
    return state.but(moved_at={**state.moved_at, name: now}, missed=missed)
