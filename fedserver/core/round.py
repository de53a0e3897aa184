"""The round as a pure state machine: events in, effects out; it reads no clock, opens nothing and sees no tensor.

waiting -> training -> aggregating -> (evaluating ->) waiting | training ... -> done; failed is left by a restart, which
tries the same step again. Newcomers to a finished federation can take it through further rounds, with a cohort of newcomers
only: done -> training -> aggregating -> ... -> evaluating -> done. Who is connected does not survive a restart, for a
restarted server has no streams.
"""

from __future__ import annotations

import math
import random

from attune.common.config import RoundSettings
from attune.common.seeds import derive
from attune.fedserver.core.messages import (
    Aggregate,
    Aggregated,
    Connected,
    Disconnected,
    Effect,
    Event,
    Excused,
    Failed,
    Finish,
    Open,
    Phase,
    Receipt,
    Record,
    Reported,
    Tick,
    quorum_of,
)


class RoundMachine:
    """Decides when a round opens, who takes part and when it closes.

    At a restart `reported` is read back from the inbox, and `finished`, who has handed in the evaluation of the end, from the
    store. adapt_rounds in `policy` must be 0 where there is nothing to adapt.
    """

    def __init__(
        self, policy: RoundSettings, seed: int, record: Record, reported: set[str], finished: set[str] | None = None
    ) -> None:
        self.policy = policy
        self.seed = seed
        self.record = record
        self.reported = reported
        self.finished = (finished or set()) - record.adapting.keys()
        if record.phase is Phase.DONE:
            self.finished |= reported
        self.newcomers: set[str] = set()  # of the connected, if newcomers are given rounds of their own
        self.connected: set[str] = set()
        self.left_at: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"RoundMachine({self.record.phase} round={self.record.round} awaited={sorted(self.awaited)})"

    @property
    def awaited(self) -> set[str]:
        """Devices that hold an order and have not answered it."""
        return set(self.record.devices) - self.reported - set(self.record.excused)

    @property
    def quorum(self) -> int:
        """Updates without which a round is not aggregated."""
        return quorum_of(self.policy, self.record)

    def resume(self, now: float) -> list[Effect]:
        """The first call after construction: takes up the step at which the last process stopped."""
        for name in self.record.devices:
            self.left_at[name] = now
        return self._aggregate() if self.record.phase is Phase.AGGREGATING else []

    def next_wake(self, now: float) -> float | None:
        """When a Tick is due: the deadline, or the end of an absent device's grace. None: nothing is open."""
        if self.record.phase not in (Phase.TRAINING, Phase.EVALUATING):
            return None
        graces = (self.left_at[name] + self.policy.grace_s for name in self.awaited & self.left_at.keys())
        return min([self.record.deadline, *(time for time in graces if time > now)])

    def handle(self, event: Event) -> list[Effect]:
        """One step. Unknown or repeated events change nothing: sending again is always safe."""
        match event:
            case Connected(name, now, newcomer):
                if newcomer and self.policy.adapt_rounds:
                    self.newcomers.add(name)
                return self._connect(name, now)
            case Disconnected(name, now):
                self.connected.discard(name)
                self.newcomers.discard(name)
                self.left_at[name] = now
                return []
            case Reported(name, round_, now):
                return self._report(name, round_, now)
            case Excused(name, now):
                if name in self.awaited:
                    self.record.excused.append(name)
                return self._progress(now)
            case Tick(now):
                return self._progress(now)
            case Aggregated(now):
                return self._aggregated(now)
            case Failed(reason):
                self.record.failed_in, self.record.phase, self.record.reason = self.record.phase, Phase.FAILED, reason
                return []

    def _connect(self, name: str, now: float) -> list[Effect]:
        self.connected.add(name)
        self.left_at.pop(name, None)
        match self.record.phase:
            case Phase.WAITING:
                return self._open_training(now)
            case Phase.TRAINING | Phase.EVALUATING if name in self.awaited:
                return [Open(*self.record.open_orders, (name,))]
            case Phase.TRAINING | Phase.EVALUATING if self.record.adapting and name in self.finished - self.newcomers:
                return [Finish((name,))]
            case Phase.TRAINING:
                return self._progress(now)
            case Phase.DONE:
                return self._serve_late({name}, now)
        return []

    def _serve_late(self, names: set[str], now: float) -> list[Effect]:
        """All rounds are over: newcomers are adapted, everyone else evaluates once and is told to go."""
        if self.newcomers:
            return self._open_adaptation(now)
        told, late = sorted(names & self.finished), sorted(names - self.finished)
        self.record.devices = sorted({*self.record.devices, *late})
        effects: list[Effect] = [Finish(tuple(told))] if told else []
        return [*effects, Open("evaluate", self.record.round, tuple(late))] if late else effects

    def _open_training(self, now: float) -> list[Effect]:
        if len(self.connected) < self.policy.min_clients:
            self.record.phase = Phase.WAITING
            return []
        names = sorted(self.connected)
        target = self.policy.clients or len(names)
        size = min(len(names), math.ceil(target * (1 + self.policy.over_selection)))
        draw = random.Random(derive(self.seed, "cohort", self.record.round + 1))  # noqa: S311 - sampling, not secrecy
        cohort = sorted(draw.sample(names, size))
        devices = names if self.policy.train == "all" else cohort
        self._order(Phase.TRAINING, devices, cohort, now)
        return [Open("train", self.record.round + 1, tuple(devices))]

    def _order(self, phase: Phase, devices: list[str], cohort: list[str], now: float) -> None:
        record = self.record
        record.phase, record.devices, record.cohort, record.excused = phase, list(devices), list(cohort), []
        record.opened_at, record.deadline = now, now + self.policy.deadline_s
        self.reported = set()

    def _report(self, name: str, round_: int, now: float) -> list[Effect]:
        expected = self.record.phase in (Phase.TRAINING, Phase.EVALUATING, Phase.DONE) and round_ == self.record.open_orders[1]
        if not expected or name not in self.record.devices:
            return [Receipt(name, accepted=False)]
        self.reported.add(name)
        if name in self.record.excused:
            self.record.excused.remove(name)
        effects: list[Effect] = [Receipt(name, accepted=True)]
        if self.record.phase is Phase.DONE:
            self.finished.add(name)
            return [*effects, Finish((name,))]
        return effects + self._progress(now)

    def _progress(self, now: float) -> list[Effect]:
        """Closes what is open if its time has come."""
        if self.record.phase is Phase.TRAINING:
            if self._is_complete(now):
                return self._aggregate()
            if self.record.adapting:
                # Newcomers that went away hold nobody up: who comes back is a newcomer again.
                over = now >= self.record.deadline or not self._worth_waiting_for(now)
                return self._end_adaptation(now) if over else []
            # Nobody is left to wait for, and there are others: no need to sit out the deadline.
            stuck = not self.awaited and self.connected - set(self.record.devices)
            return self._extend(now) if stuck or now >= self.record.deadline else []
        if self.record.phase is Phase.EVALUATING and (now >= self.record.deadline or not self._worth_waiting_for(now)):
            return self._close_evaluation(now)
        return []

    def _worth_waiting_for(self, now: float) -> set[str]:
        """Of those awaited: the connected, and those who left less than the grace period ago."""
        grace_s = self.policy.grace_s
        return {n for n in self.awaited if n in self.connected or now < self.left_at.get(n, now) + grace_s}

    def _is_complete(self, now: float) -> bool:
        updates = len(self.reported & set(self.record.cohort))
        if updates < max(1, self.quorum):
            return False
        sampled = self.policy.over_selection > 0 and self.policy.clients and not self.record.adapting
        enough = sampled and updates >= self.policy.clients
        return bool(enough) or now >= self.record.deadline or not self._worth_waiting_for(now)

    def _extend(self, now: float) -> list[Effect]:
        """Without a quorum nothing is lost: newcomers join, the troubled try again, the clock starts anew."""
        added = sorted(self.connected - set(self.record.devices))
        again = sorted((self.awaited | set(self.record.excused)) & self.connected)
        self.record.devices = sorted([*self.record.devices, *added])
        self.record.cohort = sorted([*self.record.cohort, *added])
        self.record.excused = []
        self.record.deadline = now + self.policy.deadline_s
        orders = tuple(sorted({*added, *again}))
        return [Open("train", self.record.round + 1, orders)] if orders else []

    def _aggregate(self) -> list[Effect]:
        self.record.phase = Phase.AGGREGATING
        cohort = sorted(self.reported & set(self.record.cohort))
        return [Aggregate(self.record.round + 1, tuple(cohort))]

    def _aggregated(self, now: float) -> list[Effect]:
        record = self.record
        record.round += 1
        record.last_cohort = sorted(self.reported & set(record.cohort))
        self.newcomers -= set(record.last_cohort)
        if record.adapting:
            return self._aggregated_adaptation(now)
        if self._is_evaluated(record.round):
            return self._open_evaluation(self.connected | set(record.devices), now)
        return self._open_training(now)

    def _is_evaluated(self, closed: int) -> bool:
        policy = self.policy
        late_enough = not policy.evaluate_last or closed > policy.rounds - policy.evaluate_last
        periodic = bool(policy.evaluate_every) and closed % policy.evaluate_every == 0 and late_enough
        return periodic or closed >= policy.rounds

    def _open_evaluation(self, devices: set[str], now: float) -> list[Effect]:
        self._order(Phase.EVALUATING, sorted(devices), [], now)
        self._count_grace(now)
        return [Open("evaluate", self.record.round, tuple(sorted(devices & self.connected))), *self._progress(now)]

    def _count_grace(self, now: float) -> None:
        """Those who hold orders and are not connected have their grace, from now on if it is not known when they left."""
        for name in set(self.record.devices) - self.connected:
            self.left_at.setdefault(name, now)

    def _close_evaluation(self, now: float) -> list[Effect]:
        record = self.record
        if record.round < self.policy.rounds:
            return self._open_training(now)
        record.phase = Phase.DONE
        # Who was given its rounds is none any more, also if none of its updates could be used: or it would be adapted for ever.
        self.newcomers -= record.adapting.keys()
        record.adapting = {}
        told = self.reported - self.newcomers
        self.finished |= told
        finish = Finish(tuple(sorted(told & self.connected)))
        return [finish, *self._serve_late(self.connected - self.finished, now)]

    # --- newcomers to a finished federation

    def _open_adaptation(self, now: float) -> list[Effect]:
        """The next round of the newcomers, or their evaluation when each was given its rounds.

        Others may join until the first is through, so that an adaptation has an end however many come.
        """
        given, rounds = self.record.adapting, self.policy.adapt_rounds
        if all(count < rounds for count in given.values()):
            given |= dict.fromkeys(sorted(self.newcomers - given.keys()), 0)
            self.finished -= given.keys()
        cohort = sorted(name for name, count in given.items() if count < rounds)
        if not cohort:
            return self._end_adaptation(now)
        self._order(Phase.TRAINING, cohort, cohort, now)
        self._count_grace(now)
        orders = tuple(sorted(self.connected & set(cohort)))
        return [Open("train", self.record.round + 1, orders), *self._progress(now)]

    def _aggregated_adaptation(self, now: float) -> list[Effect]:
        for name in self.record.devices:
            self.record.adapting[name] += 1
        if self.policy.adapt in ("hypernetwork", "all"):
            self.finished = set()  # what the others are served has changed: who comes back evaluates it
        return self._open_adaptation(now)

    def _end_adaptation(self, now: float) -> list[Effect]:
        """The newcomers evaluate, and with them those who have come meanwhile to fetch the state."""
        waiting = self.connected - self.finished - self.newcomers
        return self._open_evaluation(set(self.record.adapting) | waiting, now)
