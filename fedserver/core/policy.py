"""Policy of a round: when it opens and closes, which devices take part, and which answers count."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median_low
from typing import Protocol

from attune.common.config import RoundSettings
from attune.common.exchange.messages import WorkName
from attune.common.seeds import derive
from attune.common.text import listed
from attune.fedserver.core.messages import EarlierState, GoBack, Phase, Record
from attune.fedserver.core.state import LONGEST_S, STEPS, FleetPace, Round, indebted

FEW = 1 / 3  # share of a step's devices that are missing, at which it need not wait until its deadline


@dataclass(frozen=True)
class Asked:
    """Devices that get an order, and the cohort among them whose updates are aggregated."""

    devices: tuple[str, ...]
    cohort: tuple[str, ...]


class Policy(Protocol):
    """Decisions from a state and the present time alone; the phases carry them out."""

    def opens(self, state: Round) -> bool:
        """Return whether a round can open with the devices that are connected."""

    def refuses(self, state: Round) -> str:
        """Explain why no round may open although enough devices are connected; empty if one may."""

    def lacks(self, state: Round) -> str:
        """Explain which devices keep the open round from its quorum and what to do; empty if none does."""

    def ask(self, state: Round) -> Asked:
        """Choose the devices of the round that opens now. Called only if `opens` holds."""

    def ask_to_evaluate(self, state: Round) -> frozenset[str]:
        """Choose the devices that evaluate the state of the round that has just closed."""

    def evaluates(self, closed: int, last: int = 0) -> bool:
        """Return whether the state after round `closed` is evaluated; `last` is as in the record."""

    def complete(self, state: Round, now: float) -> bool:
        """Return whether the open round closes and is aggregated."""

    def over(self, state: Round, now: float) -> bool:
        """Return whether no further answer is worth waiting for."""

    def overdue(self, state: Round, now: float) -> frozenset[str]:
        """Return the devices that have missed their order if the step closes, or is extended, now."""

    def slow(self, state: Round) -> Mapping[str, float]:
        """Return the devices that answered later than the fleet's pace allows, and for how many seconds others waited."""

    def replacements(self, state: Round, now: float) -> tuple[tuple[str, str], ...]:
        """Return pairs of an absent member of the cohort and the idle device that takes its place."""

    def extends(self, state: Round, now: float) -> bool:
        """Return whether a round without its quorum asks further devices and restarts its deadline."""

    def ask_again(self, state: Round) -> frozenset[str]:
        """Choose the devices that get the order of an extended round: idle ones, and those in trouble once more."""

    def worth(self, state: Round, work: str, number: int, name: str) -> float:
        """Return the weight of an answer that comes now: 0 is too late, 1 counts in full."""

    def wakes(self, state: Round) -> frozenset[float]:
        """Return the times, the deadline among them, at which one of the decisions above can change by itself."""


def quorum_of(settings: RoundSettings, record: Record) -> int:
    """Return how many updates a round needs: at most as many as devices are sampled, or count with over-selection."""
    cohort = len(record.cohort)
    if record.adapting:
        return min(1, cohort)
    return min(settings.quorum or settings.min_clients, cohort, settings.clients or cohort)


SHOWN = 3  # names in a line for the operator
SUSPECTED = 0.2  # share of attackers that a warning reckons with
COSTS = {0.2: 58, 0.3: 82}  # points of accuracy that liars cost by their share (benchmarks/results/liars.csv)


def outvoted(settings: RoundSettings, devices: int, share: float) -> str:
    """Explain why a share of this many connected devices can be half of a cohort; empty if it cannot.

    A cohort is drawn at random, so all attackers can be in it. Of over-selected devices the fastest count.
    """
    buffered = settings.mode == "buffered"
    cohort = min((settings.buffer if buffered else settings.clients) or devices, devices)
    hostile = math.ceil(share * devices)
    if not cohort or 2 * min(hostile, cohort) < cohort:
        return ""
    enough = f"{2 * hostile + 1} ({'round.buffer' if buffered else 'round.clients'}) outvote them"
    return f"{hostile} hostile devices of {devices} can be half of a round of {cohort}; {enough}"


def heard_as(devices: int, bound: float) -> str:
    """Say as how many devices hostile ones can count within the bound on changes, and what that costs; empty if as themselves.

    Args:
        devices: The number of connected devices.
        bound: Usual changes that a change of a part which devices share can count as; 0: no bound.
    """
    if bound <= 1:
        return ""
    hostile = math.ceil(SUSPECTED * devices)
    costs = " and ".join(f"{points} points at {share:.0%}" for share, points in COSTS.items())
    return (
        f"{hostile} hostile of {devices} devices can count as {math.floor(hostile * bound)}: a change counts up to {bound:g} "
        f"usual ones (method.bound_change); in simulations of FedAvg such liars cost {costs} of the devices "
        "(docs/security.md#what-liars-cost)"
    )


@dataclass(frozen=True)
class Synchronous:
    """Rounds one after the other; an update counts in its round or not at all.

    Attributes:
        settings: The settings of rounds.
        seed: Seed of the cohorts.
        score_after: Rounds whose state is evaluated in any case.
        until: No round opens after this one, although rounds are left; None: all rounds open.
        secure: Whether updates are summed by secure aggregation.
    """

    settings: RoundSettings
    seed: int
    score_after: Collection[int] = field(default=(), kw_only=True)
    until: int | None = field(default=None, kw_only=True)
    secure: bool = field(default=False, kw_only=True)

    def opens(self, state: Round) -> bool:
        if self.until is not None and state.record.round >= self.until:
            return False
        return len(state.connected) >= self.settings.min_clients and not self.refuses(state)

    def refuses(self, state: Round) -> str:
        attackers, devices, least = self.settings.attackers, len(state.inside), self.settings.min_clients
        if state.record.phase is Phase.WAITING and devices < least <= len(state.connected):
            if self.settings.matrix:
                return "" if devices else "no device that is connected shares its model (fedclient --share-model)"
            return (
                f"round.devices = {self.settings.devices!r}: {devices} devices with this tag are connected, of at least {least}"
            )
        waits = attackers and state.record.phase is Phase.WAITING and devices >= self.settings.min_clients
        return outvoted(self.settings, devices, attackers) if waits else ""

    def lacks(self, state: Round) -> str:
        """Name the excused devices: they failed, or their update was refused."""
        excused = sorted(state.record.excused)
        if state.record.phase is not Phase.TRAINING or not excused:
            return ""
        needed = quorum_of(self.settings, state.record)
        coming = len(state.updates | (state.awaited & frozenset(state.record.cohort)))
        if coming >= needed:
            return ""
        return (
            f"round {state.record.round + 1} needs {needed} updates and cannot get more than {coming}: "
            f"{listed(excused, SHOWN)} failed or sent an update that was refused (see the note), and is asked again at the "
            "deadline. Repair or revoke such a device, or connect another one; in the next run, leave room for failures with a "
            "smaller round.quorum"
        )

    def ask(self, state: Round) -> Asked:
        """Skip devices that missed two orders in a row, unless too few devices remain without them.

        Under secure aggregation devices in debt are skipped likewise: without one of its cohort a sum takes longer.
        """
        number, settings = state.record.round + 1, self.settings
        able = state.inside - passed_over(state)
        punctual = able - indebted(state.missed, state.now) if self.secure else able
        enough = [names for names in (punctual, able) if len(names) >= settings.min_clients]
        names = sorted(enough[0] if enough else state.inside)
        target = settings.clients or len(names)
        size = min(len(names), math.ceil(target * (1 + settings.over_selection)))
        cohort = tuple(sorted(self._draw("cohort", number).sample(names, size)))
        return Asked(tuple(names) if settings.train == "all" else cohort, cohort)

    def ask_to_evaluate(self, state: Round) -> frozenset[str]:
        return (state.connected | frozenset(state.record.devices)) - passed_over(state, "evaluate")

    def evaluates(self, closed: int, last: int = 0) -> bool:
        settings, rounds = self.settings, last or self.settings.rounds
        late_enough = not settings.evaluate_last or closed > rounds - settings.evaluate_last
        periodic = bool(settings.evaluate_every) and closed % settings.evaluate_every == 0 and late_enough
        return (
            periodic
            or closed in self.score_after
            or closed > rounds - settings.evaluate_each_last
            or closed >= rounds - bool(last)
        )

    def complete(self, state: Round, now: float) -> bool:
        updates = len(state.updates)
        if updates < max(1, quorum_of(self.settings, state.record)):
            return False
        sampled = self.settings.over_selection > 0 and self.settings.clients and not state.record.adapting
        return bool(sampled and updates >= self.settings.clients) or self.over(state, now)

    def over(self, state: Round, now: float) -> bool:
        return now >= self._closes_at(state) or next(self._waited_for(state, now), None) is None

    def overdue(self, state: Round, now: float) -> frozenset[str]:
        return state.awaited if now >= self._closes_at(state) else self._stalled(state, now)

    def slow(self, state: Round) -> Mapping[str, float]:
        if self._unhurried(state):
            return {}
        fair_s, usual_s = self._fair_s(state), self._pace(state).usual_s
        late = {name: seconds - usual_s for name, seconds in state.took.items() if seconds > fair_s}
        return late if len(late) <= FEW * len(state.record.devices) else {}

    def replacements(self, state: Round, now: float) -> tuple[tuple[str, str], ...]:
        if self._replace_after_s is None:
            return ()
        absent = sorted(state.awaited & frozenset(state.record.cohort) - state.connected)
        pool, pairs = sorted(state.idle - passed_over(state)) if absent else [], []
        for gone in absent:
            if pool and now >= state.left_at[gone] + self._replace_after_s:
                other = self._draw("replacement", state.record.round + 1, gone).choice(pool)
                pool.remove(other)
                pairs.append((gone, other))
        return tuple(pairs)

    def extends(self, state: Round, now: float) -> bool:
        """Extend at the deadline. Idle devices that could bring the quorum are asked as soon as waiting for others ends."""
        aside = passed_over(state)
        if now >= state.deadline or not state.idle - aside:
            return now >= state.deadline
        return not state.awaited - aside or now >= self._closes_at(state)

    def ask_again(self, state: Round) -> frozenset[str]:
        """Ask devices that were passed over only if the quorum cannot be reached without them."""
        troubled = (state.awaited | frozenset(state.record.excused)) & state.connected
        asked, cohort = troubled | state.idle, frozenset(state.record.cohort) | state.idle
        able = asked - passed_over(state)
        enough = len(state.updates) + len(able & cohort) >= quorum_of(self.settings, state.record)
        return able if enough else asked

    def worth(self, state: Round, work: str, number: int, name: str) -> float:
        asked = name in state.record.devices or name in state.record.replaced
        return float(asked and (work, number) == state.record.open_orders)

    def wakes(self, state: Round) -> frozenset[float]:
        absent = [state.left_at[name] for name in state.awaited - state.connected]
        times = {state.deadline, self._closes_at(state), *(left + self.settings.grace_s for left in absent)}
        if self._replace_after_s is not None and state.idle:
            times |= {left + self._replace_after_s for left in absent}
        if self._stall_counts(state):
            times |= {state.moved_at[name] + self.settings.stall_s for name in state.awaited & state.connected}
        return frozenset(times)

    def _draw(self, *purpose: str | int) -> random.Random:
        return random.Random(derive(self.seed, *purpose))  # noqa: S311 - sampling, not secrecy

    @property
    def _replace_after_s(self) -> float | None:
        after_s = self.settings.replace_after_s or self.settings.grace_s
        return after_s if after_s > 0 else None

    def _waited_for(self, state: Round, now: float) -> Iterator[str]:
        """Return the awaited devices that are connected and make progress, or that left within the grace period."""
        aside = passed_over(state, state.work) | self._stalled(state, now) | self._not_waited_for(state)
        grace_s, awaited = self.settings.grace_s, (n for n in state.awaited if n not in aside)
        return (n for n in awaited if n in state.connected or now < state.left_at[n] + grace_s)

    def _not_waited_for(self, state: Round) -> frozenset[str]:
        """Return the devices in debt, if they are a minority of the step's."""
        debtors = indebted(state.missed, state.now)
        if not debtors:
            return debtors
        devices = frozenset(state.record.devices)
        debtors &= devices
        spared = 2 * len(debtors) > len(devices) or self._unhurried(state)
        return frozenset() if spared else debtors

    def _unhurried(self, state: Round) -> bool:
        """Return whether only the deadline counts."""
        return not self.settings.deadline_multiple

    def _closes_at(self, state: Round) -> float:
        """Return when a step stops waiting: earlier than the deadline if few devices are missing, by the fleet's pace.

        A fleet that has become slow as a whole keeps its deadline.
        """
        awaited = state.awaited
        able = awaited - debtors if (debtors := self._not_waited_for(state)) else awaited
        if not awaited or self._unhurried(state) or len(able) > FEW * len(state.record.devices):
            return state.deadline
        if not able:
            return min(state.deadline, state.last_answer)
        begun = max(state.asked_at.get(name, state.charged_at) for name in able)
        limit_s = self._pace(state).patience_s(able, self._fair_s(state))
        return min(state.deadline, begun + limit_s, max(begun, state.last_answer) + LONGEST_S)

    def _pace(self, state: Round) -> FleetPace:
        """Return the fleet's pace, in the first steps with the open one's answers."""
        pace = state.pace.get(state.work, FleetPace())
        return pace.after(state.took) if pace.steps < STEPS else pace

    def _fair_s(self, state: Round) -> float:
        """Return the seconds that a device may take without a debt."""
        return max(self.settings.grace_s, self.settings.deadline_multiple * self._pace(state).usual_s)

    def _stall_counts(self, state: Round) -> bool:
        # Devices report no progress while they evaluate.
        return self.settings.stall_s > 0 and state.record.phase is Phase.TRAINING

    def _stalled(self, state: Round, now: float) -> frozenset[str]:
        if not self._stall_counts(state):
            return frozenset()
        stall_s = self.settings.stall_s
        return frozenset(n for n in state.awaited & state.connected if now >= state.moved_at[n] + stall_s)


def passed_over(state: Round, work: WorkName = "train") -> frozenset[str]:
    """Return the devices that get no order of this kind of work, because they missed too many.

    A device that does not train is not asked to evaluate either.
    """
    counts = [state.missed.get(kind, {}) for kind in {"train", work}]
    return frozenset(name for of_kind in counts for name, misses in of_kind.items() if misses.passed_over(state.now))


TAKE_BACKS, WINDOW, HOUR_S = 3, 50, 3600.0  # so many times within so many rounds and within so many seconds
FLOOR = 1.0  # least loss to compare with: a multiple of a loss near 0 means nothing


def spoiled(state: Round, multiple: float, *, complete: bool) -> GoBack | None:
    """Return to which earlier state the federation must go back, and why; None if it need not, or no longer can.

    Either the median of the devices' losses has exploded, or most devices could not work with the state. A minority of the
    devices cannot cause it. The target is the newest state with a better loss: what spoiled the state may be some rounds old.
    If that state is bad too, the next round goes back further.

    Args:
        state: The state of the open step.
        multiple: The median loss has exploded if it is more than this many times that of an earlier state; 0: never.
        complete: Whether all answers are there; before that the median is not used.
    """
    record, devices = state.record, len(state.record.devices)
    if not multiple or not record.earlier or record.adapting:
        return None
    troubled = 2 * len(state.troubled) > devices
    if not (troubled or complete) or often_taken_back(record, state.unix):
        return None
    if troubled:
        return _back(record, record.earlier[-1], f"{len(state.troubled)} of {devices} devices could not work with it")
    median = median_loss(state) if complete else None
    for earlier in reversed(record.earlier if median is not None else ()):
        if median is not None and earlier.loss is not None and median > multiple * max(earlier.loss, FLOOR):
            why = f"the median of the devices' losses went from {earlier.loss:.3g} to {median:.3g}"
            return _back(record, earlier, why)
    return None


def _back(record: Record, target: EarlierState, why: str) -> GoBack:
    last = f"the state after round {record.round} was taken back"
    further = f", to that after round {target.round}" if target.round < record.round - 1 else ""
    return GoBack(record.round + 1, target.round, f"{last}{further}: {why}")


def often_taken_back(record: Record, unix: float) -> str:
    """Explain why the state is not taken back again; empty if it may be. A majority that does it has captured the rounds."""
    recent = [number for number in record.taken_back if number > record.round - WINDOW]
    times = record.taken_back_at[-TAKE_BACKS:]
    if len(recent) >= TAKE_BACKS:
        often, until = f"{len(recent)} times within {WINDOW} rounds", f"before round {recent[-TAKE_BACKS] + WINDOW + 1}"
    elif len(times) == TAKE_BACKS and times[0] <= unix < times[0] + HOUR_S:
        often, until = f"{TAKE_BACKS} times within an hour", f"for {(times[0] + HOUR_S - unix) / 60:.0f} minutes"
    else:
        return ""
    return (
        f"devices took the state back {often}; it is not taken back again {until}: see which of them report such losses or "
        "troubles, and revoke them"
    )


def median_loss(state: Round) -> float | None:
    """Return the (lower) median of the cohort's losses that were reported; None without any."""
    losses = [state.losses[name] for name in sorted(state.updates) if name in state.losses]
    return median_low(losses) if losses else None
