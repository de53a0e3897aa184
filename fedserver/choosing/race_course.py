"""Course of a race of candidate methods: which entrant trains next, and what the ledger keeps of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import msgspec

from attune.common.errors import SettingError
from attune.fedserver.choosing.racing import (
    ALONE,
    CLOSED_FORM,
    NOTHING_HELD_OUT,
    DeviceScores,
    PairedDifference,
    RaceResult,
    Rung,
    at_end,
    at_rung,
    gained_by_samples,
    rungs_of,
    scored_by_all,
)
from attune.fedserver.core.messages import Phase, Record
from attune.fedserver.core.voices import bounded


@dataclass(frozen=True)
class Leg:
    """The next piece of a race: an entrant, which trains to the end of round `until`."""

    name: str
    until: int


class Course:
    """A race under way: which entrant trains next, and what follows from the scores. It has no other state than was told it.

    Args:
        entrants: ALONE, and the candidates in their order.
        rounds: Number of all rounds.
        left_out: Why other candidates take no part, by name.
    """

    def __init__(self, entrants: Sequence[str], rounds: int, left_out: Mapping[str, str] = MappingProxyType({})) -> None:
        self._racing, self._stops = [name for name in entrants if name != ALONE], (*rungs_of(rounds), rounds)
        self._entered, self._left_out, self._scores = max(1, len(self._racing)), dict(left_out), dict[str, DeviceScores]()
        self._gained: PairedDifference | None = None  # by the closed form, which does not depend on the round
        self.rungs: list[Rung] = []
        self._stage = 0

    @property
    def leg(self) -> Leg | None:
        """The leg that is trained next; None once the race is over."""
        left = (name for name in self.present if name not in self._scores)
        return Leg(next(left), self._stops[self._stage]) if self._stage < len(self._stops) else None

    @property
    def legs_of_stage(self) -> int:
        """How many legs are left before the next comparison."""
        return len([name for name in self.present if name not in self._scores])

    @property
    def present(self) -> tuple[str, ...]:
        """The entrants that are in the race."""
        return (ALONE, *self._racing)

    @property
    def result(self) -> RaceResult:
        """The course so far; `chosen` is the winner once the race is over."""
        return RaceResult(self.rungs, self._left_out)

    def scored(self, scores: DeviceScores, *gained: DeviceScores) -> None:
        """Take in the scores of the present leg, and (of CLOSED_FORM) the arguments of `gained_by_samples`.

        Raises:
            SettingError: No device has scored ALONE.
        """
        leg = self._leg()
        self._scores[leg.name] = scores
        if leg.name == CLOSED_FORM and gained:
            self._gained = gained_by_samples(*gained) or self._gained
        self._compare()

    def failed(self, why: str) -> None:
        """Leave out the candidate of the present leg. ALONE cannot be left out.

        Raises:
            SettingError: As for `scored`.
        """
        leg = self._leg()
        self._left_out[leg.name] = f"it failed before round {leg.until} was over: {why}"
        self._racing.remove(leg.name)
        self._compare()

    def _leg(self) -> Leg:
        assert self.leg is not None  # noqa: S101 (the caller has asked)
        return self.leg

    def _compare(self) -> None:
        """Decide, if all entrants have trained to the end of the stage. No device has more than a bounded vote."""
        if self.legs_of_stage:
            return
        scores = bounded(self._comparable())
        last = self._stage == len(self._stops) - 1
        candidates = {name: of for name, of in scores.items() if name != ALONE}
        if last:
            gained = self._gained if CLOSED_FORM in candidates else None
            decision = at_end(scores, [rung.scores for rung in self.rungs], self._entered, gained)
        elif candidates:
            decision = at_rung(self._stage, candidates)
            if CLOSED_FORM in candidates and CLOSED_FORM not in decision.kept:
                decision = replace(decision, kept=(*decision.kept, CLOSED_FORM))
            self._racing = list(decision.kept)
        if last or candidates:
            self.rungs.append(Rung(self._stops[self._stage], scores, decision))
        self._stage, self._scores = self._stage + 1, {}

    def _comparable(self) -> dict[str, DeviceScores]:
        """Return the scores of the stage, and leave out candidates that cannot be compared by them.

        At least half of the devices that scored ALONE must have scored a candidate, and one device must have scored all.
        Devices can be absent, or cannot use a model that has diverged: that must neither end the race nor decide it.
        """
        judges = self._scores[ALONE].keys()
        if not judges:
            raise SettingError(NOTHING_HELD_OUT)
        while True:
            scores = {name: self._scores[name] for name in self.present}
            voters = {name: len(judges & scores[name].keys()) for name in reversed(self._racing)}
            fewest = min(voters, key=lambda name: voters[name], default=None)
            if fewest is None or (2 * voters[fewest] >= len(judges) and scored_by_all(scores)):
                return scores
            self._racing.remove(fewest)
            stop = self._stops[self._stage]
            self._left_out[fewest] = (
                f"{voters[fewest]} of the {len(judges)} devices that scored {ALONE} scored it after round {stop}"
            )


class RunLeg(msgspec.Struct, frozen=True, omit_defaults=True):
    """A leg that is over.

    Attributes:
        name: The entrant.
        until: The round after which it was scored.
        scores: By device.
        gains: What the closed form gains, by device.
        errors: Standard errors of the gains.
        failed: Why there are none; empty: there are.
    """

    name: str
    until: int
    scores: DeviceScores = {}
    gains: DeviceScores = {}
    errors: DeviceScores = {}
    failed: str = ""


class Race(msgspec.Struct, frozen=True, omit_defaults=True):
    """A server's race, as its ledger keeps it: what was asked for, and the legs that are over.

    Attributes:
        overrides: The settings as given, with `auto` as the method's name.
        rounds: Number of all rounds.
        entrants: Settings of ALONE and of the candidates, by name; empty: the devices' data are not known yet.
        left_out: Why usual candidates take no part, by name.
        legs: In their order.
    """

    overrides: dict[str, Any]
    rounds: int
    entrants: dict[str, dict[str, Any]] = {}
    left_out: dict[str, str] = {}
    legs: tuple[RunLeg, ...] = ()

    def course(self) -> Course:
        """Return the course that the legs make.

        Raises:
            SettingError: No device has scored ALONE.
        """
        course = Course(list(self.entrants), self.rounds, self.left_out)
        for over in self.legs:
            if over.failed:
                course.failed(over.failed)
            else:
                course.scored(over.scores, over.gains, over.errors)
        return course

    def after(self, over: RunLeg) -> Race:
        """Return the race with one more leg."""
        return msgspec.structs.replace(self, legs=(*self.legs, over))

    @property
    def is_over(self) -> bool:
        """True if the winner is known."""
        return bool(self.entrants) and self.course().leg is None

    def report(self) -> dict[str, Any]:
        """Return all scores and decisions so far, for JSON, and the same as lines of text.

        "trains" is the entrant that trains now; None: none yet, or the race is over.
        """
        return {**self._report(), "words": self.words()}

    def _report(self) -> dict[str, Any]:
        if not self.entrants:
            return {"chosen": None, "pays": None, "trains": None, "until": None, "rungs": [], "left_out": {}}
        course = self.course()
        leg, result = course.leg, course.result
        whole = result.report() if result.rungs else {"rungs": [], "left_out": dict(result.left_out)}
        now = {"chosen": None, "pays": None} if leg or not course.rungs else {}
        return {**whole, **now, "trains": leg.name if leg else None, "until": leg.until if leg else None}

    def words(self) -> list[str]:
        """Return the course so far as lines of text."""
        if not self.entrants:
            return ["auto waits for devices: their data say which methods can take part"]
        course = self.course()
        if course.leg is None:
            return course.result.words()
        return [*course.result.words_so_far(), f"auto trains {course.leg.name} to round {course.leg.until}"]


def run_of(name: str) -> str:
    """Return the name of an entrant's run; a method's name may have a plus."""
    return name.replace("+", "-and-")


def reached(record: Record, until: int | None) -> bool:
    """Return whether a run has closed and evaluated round `until`; None: it has no such end."""
    return bool(until) and record.round >= (until or 0) and record.revive().phase in (Phase.WAITING, Phase.DONE)
