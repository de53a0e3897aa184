"""The round as the last process left it, from the ledger and the inbox."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import msgspec

from attune.fedserver.core.messages import Phase, Record
from attune.fedserver.core.phases import Rules
from attune.fedserver.core.records import Report
from attune.fedserver.core.state import Round
from attune.fedserver.executors import Executors
from attune.fedserver.ports.ledger import Snapshot
from attune.fedserver.stores.inbox import Inbox


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
