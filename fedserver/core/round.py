"""The round: (state, event) -> (state, effects). It reads no clock, opens nothing and sees no tensor.

waiting -> training -> aggregating -> (evaluation ->) waiting | training ... -> done. Aggregating can also mean that the state
before the last round becomes the state again (fedserver.core.policy says when). Newcomers to a finished federation can
take it through further rounds: done -> adaptation -> aggregating -> adaptation ... -> evaluation -> done. failed is left when
the round is resumed, which tries the same step again.

No state is ever changed: who cannot make a step durable keeps the state before it, and nothing has happened.
"""

from __future__ import annotations

from msgspec.structs import replace

from attune.fedserver.core.messages import (
    Aggregated,
    AskAgain,
    Connected,
    DeviceProgressed,
    Disconnected,
    Effect,
    Event,
    Excused,
    Expelled,
    PassOver,
    Paused,
    Phase,
    Reported,
    Resumed,
    StepFailed,
    Tick,
)
from attune.fedserver.core.phases.base import PhaseKey, PhaseVerbs, Rules, Step, phase_of
from attune.fedserver.core.phases.closed_phases import AggregatingPhase, DonePhase, FailedPhase, WaitingPhase
from attune.fedserver.core.phases.open_phases import AdaptationPhase, EvaluationPhase, TrainingPhase
from attune.fedserver.core.policy import passed_over
from attune.fedserver.core.state import Round, without

__all__ = ["Rules", "Step", "left_s", "next_wake", "step"]

PHASES: dict[PhaseKey, PhaseVerbs] = {
    PhaseKey.WAITING: WaitingPhase(),
    PhaseKey.TRAINING: TrainingPhase(),
    PhaseKey.ADAPTATION: AdaptationPhase(),
    PhaseKey.AGGREGATING: AggregatingPhase(),
    PhaseKey.EVALUATION: EvaluationPhase(),
    PhaseKey.DONE: DonePhase(),
    PhaseKey.FAILED: FailedPhase(),
}


def step(rules: Rules, state: Round, event: Event, unix: float = 0.0) -> Step:
    """One step, through all phases that it enters. Unknown or repeated events change nothing: sending again is always safe.

    unix: unix time, which is only shown.
    """
    if isinstance(event, StepFailed):
        return Step(_failing(state, event.reason))
    found = _handle(rules, replace(state, unix=unix), event)
    effects = found.effects
    while found.then is not None:
        found = PHASES[found.then].enter(rules, found.state, event.now)
        effects += found.effects
    return Step(found.state, (*_standing(state, found.state), *effects))


def _standing(before: Round, after: Round) -> tuple[Effect, ...]:
    """Whose standing has changed: the operator is told."""
    were, are = passed_over(before), passed_over(after)
    aside, again = tuple(sorted(are - were)), tuple(sorted(were - are))
    return (*([PassOver(aside)] if aside else []), *([AskAgain(again)] if again else []))


def next_wake(rules: Rules, state: Round, now: float) -> float | None:
    """When a Tick is due. None: nothing is open, and time alone changes nothing."""
    if state.record.phase not in (Phase.TRAINING, Phase.EVALUATING):
        return None
    return min([state.deadline, *(time for time in rules.policy.wakes(state) if time > now)])


def left_s(rules: Rules, state: Round, now: float) -> float:
    """Seconds that a device has for an order sent now. After the end nobody waits, and a latecomer has the whole span."""
    return rules.settings.deadline_s if state.record.phase is Phase.DONE else max(0.0, state.deadline - now)


def _handle(rules: Rules, state: Round, event: Event) -> Step:
    phase = PHASES[phase_of(state.record)]
    match event:
        case Resumed(now):
            return _resume(rules, state, now)
        case Connected(name, now, newcomer):
            return phase.connect(rules, _entering(rules, state, name, now, newcomer), name, now)
        case Disconnected(name, now):
            return Step(_leaving(state, name, now))
        case Reported(name):
            return phase.report(rules, replace(state, run_out=without(state.run_out, name)), event)
        case DeviceProgressed(name, now):
            return phase.progress(rules, _moving(state, name, now), now)
        case Excused(name, now, troubled):
            return phase.progress(rules, _excusing(state, name, troubled), now)
        case Expelled(name, now):
            return phase.progress(rules, state.expelling(name), now)
        case Paused(on, now):
            noted = state.noting(paused=on)
            return Step(noted) if on else phase.unpaused(rules, noted, now)
        case Tick(now):
            return phase.progress(rules, state, now)
        case Aggregated(now, setback):
            return phase.aggregated(rules, state, now, setback)
        case StepFailed():
            raise AssertionError("handled before")


def _excusing(state: Round, name: str, troubled: bool) -> Round:
    if name not in state.awaited:
        return state
    excused = state.noting(excused=(*state.record.excused, name))
    return replace(excused, troubled=state.troubled | {name}) if troubled else excused


def _failing(state: Round, reason: str) -> Round:
    """A second failure leaves the step to try again as it is."""
    return state.noting(phase=Phase.FAILED, failed_in=state.record.revive().phase, reason=reason)


def _resume(rules: Rules, state: Round, now: float) -> Step:
    """Spans begin anew: of time before the restart nothing is known."""
    devices = frozenset(state.record.devices)
    state = replace(
        state,
        record=state.record.revive(),
        left_at=dict(state.left_at) | dict.fromkeys(devices - state.connected, now),
        moved_at=dict.fromkeys(devices, now),
        deadline=now + rules.settings.deadline_s,
    )
    return PHASES[phase_of(state.record)].resume(rules, state, now)


def _entering(rules: Rules, state: Round, name: str, now: float, newcomer: bool) -> Round:
    """A device that says Hello has shown that it is alive, whatever it let run out before."""
    return replace(
        state,
        connected=state.connected | {name},
        newcomers=state.newcomers | {name} if newcomer and rules.settings.adapt_rounds else state.newcomers,
        left_at=without(state.left_at, name),
        moved_at={**state.moved_at, name: now},
        run_out=without(state.run_out, name),
    )


def _leaving(state: Round, name: str, now: float) -> Round:
    return replace(
        state,
        connected=state.connected - {name},
        newcomers=state.newcomers - {name},
        left_at={**state.left_at, name: now},
    )


def _moving(state: Round, name: str, now: float) -> Round:
    """Progress brings back a device that is passed over. It does not make up for an order that ran out: only answers do."""
    run_out = without(state.run_out, name) if name in passed_over(state) else state.run_out
    return replace(state, moved_at={**state.moved_at, name: now}, run_out=run_out)
