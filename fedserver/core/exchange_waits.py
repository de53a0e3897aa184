"""Waits of secure aggregation's exchanges, by the same paces and debts as those of orders (attendance): pure code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attune.common.config import RoundSettings
from attune.fedserver.core.attendance import STEPS, FleetPace, indebted
from attune.fedserver.core.policy import FEW
from attune.fedserver.core.state import Round

EXCHANGES = 5  # of a sum: `round.grace_s` is for all of them together


@dataclass(frozen=True)
class ExchangeWait:
    """An exchange under way.

    Attributes:
        kind: Its name among the fleet's paces.
        asked: The devices that were asked.
        pending: Those of them whose answer is missing.
        took: Seconds that each of the others needed.
        least: How many answers a sum needs.
        longest_s: Seconds for which it may wait at most.
    """

    kind: str
    asked: frozenset[str]
    pending: frozenset[str]
    took: Mapping[str, float]
    least: int
    longest_s: float

    def patience_s(self, settings: RoundSettings, state: Round, now: float) -> float:
        """Return for how many seconds from its beginning the exchange waits; 0: nobody who is missing is waited for."""
        able = self.pending - self._spared(settings, state, now)
        if not able:
            return 0.0
        if not settings.deadline_multiple or len(able) > FEW * len(self.asked):
            return self.longest_s
        return min(self.longest_s, self._pace(state).patience_s(able, self._fair_s(settings, state)))

    def costs(self, settings: RoundSettings, state: Round, waited_s: float, now: float) -> dict[str, float]:
        """Return for how many seconds others waited for each device that was silent, or far slower than the fleet.

        If most devices are silent it is the exchange, and none of them is charged.
        """
        last_s, few = max(self.took.values(), default=0.0), 2 * len(self.pending) <= len(self.asked)
        silent = self.pending - self._spared(settings, state, now) if few else ()
        costs = dict.fromkeys(silent, waited_s - last_s)
        if settings.deadline_multiple and state.pace.get(self.kind, FleetPace()).steps >= STEPS:
            fair_s, usual_s = self._fair_s(settings, state), self._pace(state).usual_s
            late = {name: seconds - usual_s for name, seconds in self.took.items() if seconds > fair_s}
            costs |= late if len(late) <= FEW * len(self.asked) else {}
        return {name: cost_s for name, cost_s in costs.items() if cost_s > 0}

    def _spared(self, settings: RoundSettings, state: Round, now: float) -> frozenset[str]:
        """Return the missing devices in debt, if they are a minority and there can be a sum without them."""
        debtors = indebted(state.missed, now) & self.pending
        few = 2 * len(debtors) <= len(self.asked) and len(self.asked - debtors) >= self.least
        return debtors if few and settings.deadline_multiple else frozenset()

    def _pace(self, state: Round) -> FleetPace:
        """Return the fleet's pace; in the first exchanges of this kind with the answers to the open one."""
        pace = state.pace.get(self.kind, FleetPace())
        return pace.after(self.took) if pace.steps < STEPS else pace

    def _fair_s(self, settings: RoundSettings, state: Round) -> float:
        """Return the seconds that a device may take without a debt."""
        return max(settings.grace_s / EXCHANGES, settings.deadline_multiple * self._pace(state).usual_s)
