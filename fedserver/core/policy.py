"""When a round opens and closes, who is asked, and what a late update is worth. Nothing else decides these."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import median_low
from typing import Protocol

from attune.common.config import RoundSettings
from attune.common.seeds import derive
from attune.fedserver.core.messages import Phase, Record
from attune.fedserver.core.state import Round

PATIENCE = 2  # orders in a row that a device may let run out before it is passed over


@dataclass(frozen=True)
class Asked:
    """Who gets an order, and whose updates are aggregated."""

    devices: tuple[str, ...]
    cohort: tuple[str, ...]


class Policy(Protocol):
    """Decides from a state and the present time alone; the phases carry it out."""

    def opens(self, state: Round) -> bool:
        """Whether a round can open with those who are connected."""

    def ask(self, state: Round) -> Asked:
        """Who takes part in the round that opens now. Called only where `opens` holds."""

    def ask_to_evaluate(self, state: Round) -> frozenset[str]:
        """Who evaluates the state after the round that was closed now."""

    def evaluates(self, closed: int) -> bool:
        """Whether the state after round `closed` is evaluated."""

    def complete(self, state: Round, now: float) -> bool:
        """Whether the open round closes and is aggregated."""

    def over(self, state: Round, now: float) -> bool:
        """Whether nobody is waited for any longer, whatever has been answered."""

    def overdue(self, state: Round, now: float) -> frozenset[str]:
        """Who lets its order run out if the step closes, or its time is extended, now."""

    def replacements(self, state: Round, now: float) -> tuple[tuple[str, str], ...]:
        """Members of the cohort that are no longer counted on, each with the idle device that takes its place."""

    def extends(self, state: Round, now: float) -> bool:
        """Whether a round without its quorum asks others too and begins its time anew."""

    def ask_again(self, state: Round) -> frozenset[str]:
        """Who is sent the order of the open round when its time is extended: others, and those that had trouble."""

    def worth(self, state: Round, work: str, number: int, name: str) -> float:
        """What a device's answer to an order counts if it comes now: 0 is late, and 1 is in full."""

    def wakes(self, state: Round) -> frozenset[float]:
        """The times at which, if nothing else happens, one of the answers above can change. The deadline is one of them."""


def quorum_of(settings: RoundSettings, record: Record) -> int:
    """Updates without which a round is not aggregated: never more than are sampled, or (with over-selection) than count."""
    cohort = len(record.cohort)
    if record.adapting:
        return min(1, cohort)
    return min(settings.quorum or settings.min_clients, cohort, settings.clients or cohort)


@dataclass(frozen=True)
class Synchronous:
    """Rounds one after the other; an update counts in its round or not at all."""

    settings: RoundSettings
    seed: int

    def opens(self, state: Round) -> bool:
        return len(state.connected) >= self.settings.min_clients

    def ask(self, state: Round) -> Asked:
        """Who let orders run out is passed over, unless there is no round without it: then it costs nobody's time."""
        number, settings = state.record.round + 1, self.settings
        able = state.connected - passed_over(state)
        names = sorted(able if len(able) >= settings.min_clients else state.connected)
        target = settings.clients or len(names)
        size = min(len(names), math.ceil(target * (1 + settings.over_selection)))
        cohort = tuple(sorted(self._draw("cohort", number).sample(names, size)))
        return Asked(tuple(names) if settings.train == "all" else cohort, cohort)

    def ask_to_evaluate(self, state: Round) -> frozenset[str]:
        return (state.connected | frozenset(state.record.devices)) - passed_over(state)

    def evaluates(self, closed: int) -> bool:
        settings = self.settings
        late_enough = not settings.evaluate_last or closed > settings.rounds - settings.evaluate_last
        periodic = bool(settings.evaluate_every) and closed % settings.evaluate_every == 0 and late_enough
        return periodic or closed > settings.rounds - settings.evaluate_each_last or closed >= settings.rounds

    def complete(self, state: Round, now: float) -> bool:
        updates = len(state.updates)
        if updates < max(1, quorum_of(self.settings, state.record)):
            return False
        sampled = self.settings.over_selection > 0 and self.settings.clients and not state.record.adapting
        return bool(sampled and updates >= self.settings.clients) or self.over(state, now)

    def over(self, state: Round, now: float) -> bool:
        return now >= state.deadline or not self._waited_for(state, now)

    def overdue(self, state: Round, now: float) -> frozenset[str]:
        return state.awaited if now >= state.deadline else self._stalled(state, now)

    def replacements(self, state: Round, now: float) -> tuple[tuple[str, str], ...]:
        if self._replace_after_s is None:
            return ()
        pool = sorted(state.idle - passed_over(state))
        found = []
        for gone in sorted(state.awaited & frozenset(state.record.cohort) - state.connected):
            if pool and now >= state.left_at[gone] + self._replace_after_s:
                other = self._draw("replacement", state.record.round + 1, gone).choice(pool)
                pool.remove(other)
                found.append((gone, other))
        return tuple(found)

    def extends(self, state: Round, now: float) -> bool:
        """At the deadline; and at once if nobody is left to wait for and there are others."""
        aside = passed_over(state)
        return now >= state.deadline or bool(not state.awaited - aside and state.idle - aside)

    def ask_again(self, state: Round) -> frozenset[str]:
        """Who let orders run out is asked only where the quorum cannot be reached without it."""
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
        times = {state.deadline, *(left + self.settings.grace_s for left in absent)}
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

    def _waited_for(self, state: Round, now: float) -> frozenset[str]:
        """Of those awaited: the connected that move, and those who left less than the grace period ago."""
        aside = passed_over(state) | self._stalled(state, now)
        grace_s = self.settings.grace_s
        return frozenset(n for n in state.awaited - aside if n in state.connected or now < state.left_at[n] + grace_s)

    def _stall_counts(self, state: Round) -> bool:
        # Devices say nothing of their progress while they evaluate.
        return self.settings.stall_s > 0 and state.record.phase is Phase.TRAINING

    def _stalled(self, state: Round, now: float) -> frozenset[str]:
        if not self._stall_counts(state):
            return frozenset()
        stall_s = self.settings.stall_s
        return frozenset(n for n in state.awaited & state.connected if now >= state.moved_at[n] + stall_s)


def passed_over(state: Round) -> frozenset[str]:
    """Devices that are not asked before they have shown that they can."""
    return frozenset(name for name, count in state.run_out.items() if count >= PATIENCE)


FLOOR = 1.0  # of the loss that others are compared with: near 0 a multiple of a loss says nothing


def spoiled(state: Round, multiple: float, *, complete: bool) -> str:
    """Why the state before the last round is to be the state again; empty: it is not, or it is not known any more.

    multiple: of the last good median loss, at which losses have exploded; 0: never. complete: whether the answers are all
    there; a median of some of them says nothing yet. A minority of devices decides nothing of this.
    """
    record = state.record
    if not multiple or not record.kept or record.adapting:
        return ""
    last, troubled = f"the state after round {record.round} was taken back", len(state.troubled)
    if 2 * troubled > len(record.devices):
        return f"{last}: {troubled} of {len(record.devices)} devices could not work with it"
    median = median_loss(state) if complete else None
    if median is None or record.loss is None or median <= multiple * max(record.loss, FLOOR):
        return ""
    return f"{last}: the median of the devices' losses went from {record.loss:.3g} to {median:.3g}"


def median_loss(state: Round) -> float | None:
    """Of the losses of the cohort whose updates are there, the lower of the two in the middle; None without any."""
    losses = [state.losses[name] for name in sorted(state.updates) if name in state.losses]
    return median_low(losses) if losses else None
