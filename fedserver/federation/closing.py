"""What a round came to: its updates aggregated into the next state, which waits beside the present one to be committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attune.fedserver.core.adaptation import AdaptationSpec
from attune.fedserver.core.records import Report
from attune.fedserver.core.state import Round
from attune.fedserver.executors import Executors
from attune.fedserver.federation.orders import Orders
from attune.fedserver.ports.lab import Lab, RoundOutcome
from attune.fedserver.stores.inbox import Inbox


@dataclass(frozen=True)
class Closing:
    """What a round came to, before it is committed."""

    number: int
    rows: Sequence[Report]
    marks: Mapping[str, Mapping[str, int]]
    outcome: RoundOutcome
    setback: str = ""  # why its updates make no state


class Closings:
    """Makes a closing of what lies in the inbox. Making it again writes the same files."""

    def __init__(self, adaptation: AdaptationSpec | None, inbox: Inbox, lab: Lab, orders: Orders, executors: Executors) -> None:
        self._adaptation, self._inbox, self._lab = adaptation, inbox, lab
        self._orders, self._executors = orders, executors

    async def make(self, state: Round, number: int, cohort: frozenset[str], spoiled: str) -> Closing:
        """cohort: whose updates count. spoiled: why the present state is given up for the one before it, instead.

        Errors: those of the lab, the inbox and the ledger.
        """
        found = await self._executors.disk(self._inbox.entries, "train", number)
        entries = {name: entry for name, entry in found.items() if name in state.reported}  # others are late
        rows = [entry.row for entry in entries.values()]
        marks = await self._orders.fetched(state.record, entries, number - 1, "train")
        if spoiled:
            outcome = await self._lab.go_back()
            if not outcome.slots:
                spoiled = f"{spoiled}; but the state before it is not known any more, so it stays"
            return Closing(number, rows, marks, outcome, spoiled)
        updates = {name: entry for name, entry in entries.items() if name in cohort}
        founders = await self._orders.founders(updates)
        if state.record.adapting and self._adaptation is not None:
            outcome = await self._lab.adapt(updates, self._adaptation, founders)
        else:
            outcome = await self._lab.aggregate(updates, founders)
        for name in updates if not outcome.refused else ():
            marks.setdefault(name, {})["contributed"] = number
        return Closing(number, rows, marks, outcome, outcome.refused)
