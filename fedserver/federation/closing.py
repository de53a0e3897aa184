"""Closing of a round: its updates are aggregated into the next state, which waits beside the present one for the commit."""

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
    """Result of a round, before it is committed."""

    number: int
    rows: Sequence[Report]
    marks: Mapping[str, Mapping[str, int]]
    outcome: RoundOutcome
    setback: str = ""  # why its updates make no state


class RoundCloser:
    """Aggregator of the updates in the inbox. Closing a round again writes the same files."""

    def __init__(
        self, adaptation: AdaptationSpec | None, inbox: Inbox, lab: Lab, orders: OrderSender, executors: Executors
    ) -> None:
        self._adaptation, self._inbox, self._lab = adaptation, inbox, lab
        self._orders, self._executors = orders, executors

    async def make(self, state: Round, number: int, cohort: frozenset[str], spoiled: str) -> ClosedRound:
        """Aggregate the updates of a round.

        Args:
            state: The round.
            number: Its number.
            cohort: The devices whose updates count.
            spoiled: Why the state goes back to the one before, instead of an aggregation; empty: it does not.

        Raises:
            AttuneError: As in the lab, the inbox and the ledger.
        """
        accepted = await self._executors.disk(self._inbox.entries, "train", number)
        entries = {name: entry for name, entry in accepted.items() if name in state.reported}  # others are late
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


async def taken_up(snapshot: Snapshot, rules: Rules, inbox: Inbox, executors: Executors) -> Round:
    """Return the round of a snapshot with what was reported to it. Entries of the inbox for no open order are removed."""
    record = snapshot.record
    await executors.disk(inbox.clear_except, *record.open_orders, record.round)
    handed_in = await executors.disk(inbox.names, *record.open_orders)
    reported = await _reported(snapshot, inbox, executors)
    losses = {name: row.loss for name, row in reported.items() if row.work == "train" and row.loss is not None}
    return Round.of(_reopened(record, handed_in - reported.keys()), reported, _finished(snapshot, rules), losses)


async def _reported(snapshot: Snapshot, inbox: Inbox, executors: Executors) -> dict[str, Report]:
    """Return the reports on the open orders: from the inbox, or after the end from the evaluation that was committed."""
    record = snapshot.record
    if record.revive().phase is Phase.DONE:
        return {row.client: row for row in snapshot.rows if (row.work, row.round) == ("evaluate", record.round)}
    entries = await executors.disk(inbox.entries, *record.open_orders)
    return {name: entry.row for name, entry in entries.items()}


def _reopened(record: Record, damaged: AbstractSet[str]) -> Record:
    """Open a round again that was about to be closed, if one of its updates is damaged.

    The device sends the update once more, and the state gets the same bits as without the damage.
    """
    if damaged and record.revive().phase is Phase.AGGREGATING:
        return msgspec.structs.replace(record.revive(), phase=Phase.TRAINING)
    return record


def _finished(snapshot: Snapshot, rules: Rules) -> set[str]:
    """Return the devices that have evaluated the end.

    If adaptations change what all devices are served, the latest adaptation counts as the end.
    """
    rounds = rules.settings.rounds
    first = max(snapshot.record.round, rounds) if rules.common else rounds
    return {row.client for row in snapshot.rows if row.work == "evaluate" and row.round >= first}
