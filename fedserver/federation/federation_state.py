"""State that the handlers of a federation share, and how a process takes it up from the ledger and the inbox."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec

from attune.common.errors import CertificateRefused
from attune.common.plan import Plan
from attune.common.task import ScoredTask
from attune.fedserver.core.messages import Phase, Record
from attune.fedserver.core.orderbook import OrderBook
from attune.fedserver.core.phases import Rules
from attune.fedserver.core.planning import ResolvedSettings
from attune.fedserver.core.records import Report
from attune.fedserver.core.state import Round, training_orders, with_arrivals
from attune.fedserver.executors import Executors
from attune.fedserver.federation.steps import Clock, Troubles, Turns
from attune.fedserver.federation.streams import REVOKED, DeviceActivity, RevokedDevices, Streams
from attune.fedserver.lab.thread import ThreadLab
from attune.fedserver.ports.ledger import Snapshot
from attune.fedserver.ports.storage import Storage
from attune.fedserver.stores.inbox import Inbox, check_age

Handle = Callable[..., Coroutine[Any, Any, bool]]  # takes events in; returns whether an update that they report counts


class FederationState:
    """State of one federation in one process: handlers get it, and none of them gets the coordinator.

    Args:
        storage: The ledger, the blobs and the spool.
        lab: Tensor work.
        settings: The federation's settings.
        executors: The threads.
        clock: The clocks.
        turns: The queue of steps.

    Attributes:
        round: The round, as the pure core knows it.
        saved: The record that is durable; None: this process has written none.
        book: The open orders.
        inbox: The updates that are durable.
        plan: The plan; None: there is none yet.
        max_bytes: The largest blob that can be an answer, for each part that devices hand in.
        run: The name of the run; empty: the first.
    """

    def __init__(
        self,
        storage: Storage,
        lab: ThreadLab,
        settings: ResolvedSettings,
        executors: Executors,
        clock: Clock = Clock(),  # noqa: B008 - it is immutable
        turns: Turns | None = None,
    ) -> None:
        self.storage, self.lab, self.executors, self.clock = storage, lab, executors, clock
        self.settings, self.rules = settings, settings.rules
        self.round, self.book, self.inbox = Round(), OrderBook(), Inbox(storage.blobs)
        self.saved: Record | None = None
        self.streams, self.revoked, self.activity = Streams(), RevokedDevices(), DeviceActivity(clock.unix)
        self.turns, self.troubles = turns or Turns(), Troubles()
        self.turns.met = self.troubles.met
        self.plan: Plan | None = None
        self.max_bytes: Mapping[str, int] = {}
        self.run = ""

    @property
    def task(self) -> ScoredTask:
        """Task of the plan with its score, or "classes" without a plan."""
        if self.plan is None:
            return "classes"
        return "ranked" if self.plan.score == "auroc" else self.plan.score or self.plan.task

    @property
    def line(self) -> str:
        """One line for people: the phase, the rounds and the devices."""
        record, most = self.round.record, self.settings.round.rounds
        return f"{record.phase}, {record.round} of {record.last or most} rounds, {len(self.streams)} devices"

    async def restore(self) -> Snapshot:
        """Read the durable state, without tensors.

        Raises:
            HomeMismatch: The ledger is older than the state.
        """
        await self.storage.ledger.disconnect_all(self.clock.unix())
        snapshot = await self.storage.ledger.snapshot()
        await self.executors.disk(check_age, self.storage.blobs, snapshot.record.round)
        self.round = await _taken_up(snapshot, self.rules, self.inbox, self.executors)
        for device in snapshot.devices:
            if device.revoked:  # maybe while no server ran
                self.revoked.add(device.name, CertificateRefused(REVOKED.format(device.name)))
                await self.executors.disk(self.inbox.discard, self.round.record.order_of(device.name))
                self.round = self.round.expelling(device.name)
        self.plan, self.run = snapshot.plan, snapshot.run
        return snapshot


async def _taken_up(snapshot: Snapshot, rules: Rules, inbox: Inbox, executors: Executors) -> Round:
    """Return the round of a snapshot with what was reported to it. Entries of the inbox for no open order are removed."""
    record = snapshot.record
    await executors.disk(inbox.clear_except, *record.open_orders, record.round, record.kept_orders)
    handed_in = await executors.disk(inbox.names, *record.open_orders)
    reported = await _reported(snapshot, inbox, executors)
    if orders := training_orders(record):
        entries, asked = await executors.disk(inbox.entries, "train", record.round + 1, orders), {one.client for one in orders}
        rows = {name: entry.row for name, entry in entries.items() if name in asked}
        record, before = with_arrivals(record, rows)
        handed_in, reported = handed_in | before, reported | rows
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
    if damaged and record.revive().phase is Phase.AGGREGATING and record.fixed is None:
        return msgspec.structs.replace(record.revive(), phase=Phase.TRAINING)
    return record


def _finished(snapshot: Snapshot, rules: Rules) -> set[str]:
    """Return the devices that have evaluated the end.

    If adaptations change what all devices are served, the latest adaptation counts as the end.
    """
    rounds = snapshot.record.last or rules.settings.rounds
    first = max(snapshot.record.round, rounds) if rules.common else rounds
    return {row.client for row in snapshot.rows if row.work == "evaluate" and row.round >= first}
