"""Secure aggregation of a closed round: the exchanges with its devices, until its sum can be unmasked or there is none.

The exchanges run beside the turns. A device answers on its stream, and hands its masked update in by calls; both only leave
something here, and wake the exchange that waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from attune.common.errors import UpdateRefused
from attune.common.exchange.messages import FixedSurvivors
from attune.common.text import listed
from attune.fedserver.core.messages import Attempted, OrderId, Record
from attune.fedserver.federation.exchanger import Exchanger
from attune.fedserver.federation.federation_state import FederationState, Handle

if TYPE_CHECKING:
    from attune.fedserver.core.collector import Unmasking

LOG = logging.getLogger("fedserver")
ATTEMPTS = 3  # of a process, before a round ends without a sum


@dataclass(frozen=True)
class UnmaskedSum:
    """Outcome of a round's exchanges.

    Attributes:
        attempt: The attempt whose masks the updates have.
        survivors: The devices whose updates are summed.
        unmasking: Secrets that take the masks off their sum.
        refused: Why there is no sum; empty: there is one.
        bound: Whether devices may take part in no other sum from this start.
    """

    attempt: int = 0
    survivors: frozenset[str] = frozenset()
    unmasking: Unmasking | None = None
    refused: str = ""
    bound: bool = True

    def lacks(self, attempts: Mapping[str, int]) -> str:
        """Explain why there is no sum of what the inbox has (device -> attempt of its update); empty if there is one."""
        lost = [name for name in sorted(self.survivors) if attempts.get(name) != self.attempt]
        return self.refused or (
            f"the masked update of {lost[0]} is gone; no other sum of this round may be made" if lost else ""
        )


class SecureRounds(Exchanger):
    """The exchanges of the round that is being closed.

    Args:
        state: The federation. Without privacy.secure_aggregation all of this does nothing.
        name: Its name, as in the plan.
        handle: Tells the round which attempt is made, and its survivors once they are fixed. It is durable then.
    """

    def __init__(self, state: FederationState, name: str, handle: Handle) -> None:
        super().__init__(state, handle)
        privacy = state.settings.privacy
        self.on, self._minimum, self._wait_s = privacy.secure_aggregation, privacy.secure_devices, privacy.secure_wait_s
        self.clip = privacy.secure_clip
        self._federation, self._spare, self._same_cohort = name, privacy.secure_spare, privacy.same_cohort

    async def sum(self, run: str, record: Record, number: int, cohort: frozenset[str]) -> UnmaskedSum:
        """Carry the exchanges out with a round's cohort, or go on with the survivors that an earlier process has fixed."""
        from attune.common.secure.statements import Occasion
        from attune.fedserver.core.collector import CohortRule, Collector

        names, why, bound = tuple(sorted(cohort)), "", record.fixed is not None
        attempt, fixed = record.attempt, record.fixed
        whole = bool(record.same_cohort) and record.cohort == record.same_cohort
        if whole and (missing := set(record.same_cohort) - cohort) and fixed is None:
            why = f"{listed(sorted(missing))} did not train, and all sums are over one cohort (privacy.same_cohort)"
            return UnmaskedSum(refused=why, bound=False)
        rule = CohortRule(names, self._minimum, self._spare, whole)
        known = cohort | frozenset(fixed.survivors if fixed else ())
        orders = {name: str(OrderId("train", number, name)) for name in known}
        for _ in range(ATTEMPTS):
            if fixed is None:
                attempt += 1
                await self._note(attempt)
            occasion = Occasion(self._federation, run, number, attempt)
            try:
                collector = Collector(occasion, orders, rule, fixed)
                unmasking = await self.carried_out(collector, self._wait_s, number, partial(self._note, attempt))
            except UpdateRefused as refusal:
                why = str(refusal)
                LOG.warning("round %d, attempt %d: %s", number, attempt, why)
                if (tried := self.collector) is None:
                    break  # there are too few devices for any attempt
                fixed, bound = tried.fixed, tried.bound or tried.fixed is not None
                if kept := tried.kept_cohort:
                    await self._note(attempt, cohort=kept)
                if bound or kept:
                    break  # the sum of other devices beside this one would show what differs
            else:
                fixed = collector.fixed
                LOG.info("round %d: %d of %d updates are summed", number, len(unmasking.selves), len(names))
                return UnmaskedSum(attempt, frozenset(unmasking.selves), unmasking)
            finally:
                self.collector = None
        return UnmaskedSum(refused=why, bound=bound)

    async def _note(self, attempt: int, fixed: FixedSurvivors | None = None, cohort: tuple[str, ...] = ()) -> None:
        if fixed is not None and self._same_cohort:
            cohort = fixed.survivors
        event = Attempted(self._state.clock.monotonic(), attempt, fixed, cohort)
        await self._state.turns.take(lambda: self._handle(event))

    # --- what devices do meanwhile

    def awaits(self, order: OrderId, attempt: int = 0) -> bool:
        """Return whether the masked update for this order is waited for; attempt: which one, 0 for whichever it is."""
        collector = self.collector
        if collector is None or collector.exchange != "masked" or order.client not in collector.asked:
            return False
        return (order.work, order.round) == ("train", collector.occasion.round) and attempt in (0, collector.occasion.attempt)

    def accepted(self, order: OrderId, attempt: int) -> bool:
        """Take note of a durable masked update, and return whether it came in time."""
        in_time = self.awaits(order, attempt)
        if in_time:
            self.masked(order.client)
        return in_time
