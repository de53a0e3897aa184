"""What a round came to: its updates aggregated into the next state, which waits beside the present one to be committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import msgspec

from attune.fedserver.core.adaptation import AdaptationSpec
from attune.fedserver.core.messages import Phase, Record
from attune.fedserver.core.phases import Rules
from attune.fedserver.core.records import Report
from attune.fedserver.core.state import Round
from attune.fedserver.executors import Executors
from attune.fedserver.federation.orders import OrderSender
from attune.fedserver.ports.lab import Lab, RoundOutcome
from attune.fedserver.ports.ledger import Snapshot
from attune.fedserver.stores.inbox import Inbox


@dataclass(frozen=True)
class ClosedRound:
    """What a round came to, before it is committed."""

    number: int
    rows: Sequence[Report]
    marks: Mapping[str, Mapping[str, int]]
    outcome: RoundOutcome
    setback: str = ""  # why its updates make no state


class RoundCloser:
    """Makes a closing of what lies in the inbox. Making it again writes the same files."""

    def __init__(
        self, adaptation: AdaptationSpec | None, inbox: Inbox, lab: Lab, orders: OrderSender, executors: Executors
    ) -> None:
        self._adaptation, self._inbox, self._lab = adaptation, inbox, lab
        self._orders, self._executors = orders, executors

    async def make(self, state: Round, number: int, cohort: frozenset[str], spoiled: str) -> ClosedRound:
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
            return ClosedRound(number, rows, marks, outcome, spoiled)
        updates = {name: entry for name, entry in entries.items() if name in cohort}
        founders = await self._orders.founders(updates)
        if state.record.adapting and self._adaptation is not None:
            outcome = await self._lab.adapt(updates, self._adaptation, founders)
        else:
            outcome = await self._lab.aggregate(updates, founders)
        for name in updates if not outcome.refused else ():
            marks.setdefault(name, {})["contributed"] = number
        return ClosedRound(number, rows, marks, outcome, outcome.refused)


async def taken_up(found: Snapshot, rules: Rules, inbox: Inbox, executors: Executors) -> Round:
    """The round of `found`, with what was reported to it. What the inbox holds for no open order is removed."""
    record = found.record
    await executors.disk(inbox.clear_except, *record.open_orders, record.round)
    handed_in = await executors.disk(inbox.names, *record.open_orders)
    reported = await _reported(found, inbox, executors)
    losses = {name: row.loss for name, row in reported.items() if row.work == "train" and row.loss is not None}
    return Round.of(_reopened(record, handed_in - reported.keys()), reported, _finished(found, rules), losses)


async def _reported(found: Snapshot, inbox: Inbox, executors: Executors) -> dict[str, Report]:
    """Who has answered the open orders: from the inbox, or after the end from the evaluation that was committed."""
    record = found.record
    if record.revive().phase is Phase.DONE:
        return {row.client: row for row in found.rows if (row.work, row.round) == ("evaluate", record.round)}
    entries = await executors.disk(inbox.entries, *record.open_orders)
    return {name: entry.row for name, entry in entries.items()}


def _reopened(record: Record, damaged: AbstractSet[str]) -> Record:
    """A round that was about to be closed is open again if an update of it is damaged.

    Its device sends it once more, and the state gets the same bits as without the damage.
    """
    if damaged and record.revive().phase is Phase.AGGREGATING:
        return msgspec.structs.replace(record.revive(), phase=Phase.TRAINING)
    return record


def _finished(found: Snapshot, rules: Rules) -> set[str]:
    """Who has evaluated the end, or what adaptations have made of it where they change what everybody is served."""
    rounds = rules.settings.rounds
    first = max(found.record.round, rounds) if rules.common else rounds
    return {row.client for row in found.rows if row.work == "evaluate" and row.round >= first}
