"""Performs what the round decides: one event at a time through the pure machine, then its effects.

fedserver.core.round decides; a fedserver.ports.lab works on tensors. This file keeps the order in which
things become true: first durable, then known.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Coroutine, Iterable

import msgspec

from attune.common.errors import AttuneError, FederationFailed, OrderClosed, UpdateRefused
from attune.common.plan import Plan, Profile
from attune.fedserver.core import messages as events
from attune.fedserver.core import planning
from attune.fedserver.core.accuracy import summary
from attune.fedserver.core.planning import ResolvedSettings
from attune.fedserver.core.records import Slot
from attune.fedserver.core.round import RoundMachine
from attune.fedserver.executors import Executors
from attune.fedserver.federation.orders import Orders
from attune.fedserver.federation.streams import Stream, Streams
from attune.fedserver.ports.blobs import Blobs
from attune.fedserver.ports.lab import Lab
from attune.fedserver.stores.inbox import Inbox
from attune.fedserver.stores.sqlite import Store

LOG = logging.getLogger("fedserver")
NOTHING_PERSONAL = "method {} keeps nothing of a device's own: newcomers get the common model as it is"
GOODBYE_S, GOODBYE_STEPS = 10.0, 100


class Coordinator:
    """The federation on the event loop: who is connected, which orders are out, and what is durable."""

    def __init__(
        self,
        blobs: Blobs,
        lab: Lab,
        store: Store,
        settings: ResolvedSettings,
        federation: str,
        executors: Executors,
    ) -> None:
        self.settings, self.lab = settings, lab
        self.max_bytes: dict[str, int] = {}  # part that devices hand in -> the largest blob that can be an answer
        self.finished = asyncio.Event()  # done, or failed
        self.unusable = asyncio.Event()  # the settings fit no model: nothing can be done before they are changed
        self.error: AttuneError | None = None
        self.inbox = Inbox(blobs)
        self.streams = Streams(store)
        self._orders = Orders(settings, store, self.streams, lab)
        self.book = self._orders.book
        self._blobs, self._store, self._federation, self._executors = blobs, store, federation, executors
        saved = store.get("plan")
        self._plan: Plan | None = msgspec.convert(saved, Plan) if saved else None
        self._receipts: dict[str, bool] = {}
        self._turn = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        record = self._reopened(store.record().revive())
        self._saved_record = b""
        self.machine = RoundMachine(settings.policy, settings.seed, record, self._reported(record), self._finished(record))

    def __repr__(self) -> str:
        return f"Coordinator({self.machine!r}, {self.streams!r})"

    def _reopened(self, record: events.Record) -> events.Record:
        """The record at start: a round that was about to be closed is open again if an update of it is damaged.

        Its device sends it once more, and the state gets the same bits as without the damage.
        """
        if record.phase is not events.Phase.AGGREGATING:
            return record
        work, number = record.open_orders
        before = self.inbox.names(work, number)
        if before == set(self.inbox.entries(work, number)):
            return record
        return msgspec.structs.replace(
            record, phase=events.Phase.TRAINING, deadline=time.time() + self.settings.round.deadline_s
        )

    def _reported(self, record: events.Record) -> set[str]:
        """Who has answered the open orders: from the inbox, or after the end from the evaluation that was committed."""
        if record.phase is events.Phase.DONE:
            return {row.client for row in self._store.rows() if (row.work, row.round) == ("evaluate", record.round)}
        return set(self.inbox.entries(*record.open_orders))

    def _finished(self, record: events.Record) -> set[str]:
        """Who has evaluated the end, or what adaptations have made of it where they change what everybody is served."""
        policy = self.settings.policy
        first = record.round if policy.adapt in ("hypernetwork", "all") else policy.rounds
        return {row.client for row in self._store.rows() if row.work == "evaluate" and row.round >= max(first, policy.rounds)}

    async def start(self) -> None:
        """Takes up the step at which the last process stopped."""
        await self._executors.disk(self._blobs.sweep)
        await self._executors.disk(self.inbox.clear_except, *self.machine.record.open_orders, self.machine.record.round)
        if self._plan is not None:
            await self._start_lab(self._plan)
        async with self._turn:
            effects = self.machine.resume(time.time())
            self._save_record()
            await self._follow(effects)
        if self.machine.record.phase is events.Phase.DONE:
            self.finished.set()

    # --- devices come and go

    async def connect(self, name: str, profile: Profile, software: str) -> Stream:
        """A device's new stream; it owns the device's orders from now on.

        Errors: SettingError, ShapeMismatch, UndeclaredLabels for a profile that cannot be or does not fit.
        """
        planning.check_possible(profile, name)
        if self._plan is not None:
            planning.check_fits(profile, self._plan, name)
        else:
            for other, reference in self.streams.profiles().items():
                if other != name:
                    planning.check_like(profile, reference, name)
        stream = self.streams.enter(name, profile, software)
        self._spawn(self._welcome(stream))
        return stream

    async def _welcome(self, stream: Stream) -> None:
        async with self._turn:
            if not self.streams.is_current(stream):
                return
            if self._plan is not None:
                self._send_plan(stream.name, self._plan)
            elif len(self.streams) >= self.settings.round.min_clients and not await self._try_plan():
                return
            await self._handle(events.Connected(stream.name, time.time(), newcomer=self._is_newcomer(stream.name)))
        self._tell_who_waits(stream)

    def _is_newcomer(self, name: str) -> bool:
        device = self._store.device(name)
        return device is None or not device.contributed

    def _send_plan(self, name: str, plan: Plan) -> None:
        self.streams.send(name, events.Welcome(plan))

    def _tell_who_waits(self, stream: Stream) -> None:
        record = self.machine.record
        missing = self.settings.round.min_clients - len(self.streams)
        if record.phase is events.Phase.WAITING and missing > 0:
            stream.send(events.Notice(f"waiting for {missing} more device{'s' if missing > 1 else ''}"))
        elif record.phase is events.Phase.DONE and self.settings.round.adapt_rounds and not self.settings.adaptation:
            stream.send(events.Notice(NOTHING_PERSONAL.format(self.settings.method.name)))
        elif record.phase is events.Phase.TRAINING and stream.name not in record.devices:
            stream.send(events.Notice(f"round {record.round + 1} is under way; waiting for the next"))

    async def disconnect(self, stream: Stream) -> None:
        """The stream is gone. An older stream of a device that has reconnected changes nothing."""
        if self.streams.leave(stream):
            await self.dispatch(events.Disconnected(stream.name, time.time()))

    async def excuse(self, name: str, reason: str) -> None:
        """The round does not wait for this device any longer; the reason is shown to the operator."""
        LOG.warning("%s: %s", name, reason)
        self._store.update_device(name, note=reason[:500])
        await self.dispatch(events.Excused(name, time.time()))

    async def goodbye(self) -> None:
        """Until the federation is done or has failed, and the devices that were told have hung up (or had time to)."""
        await self.finished.wait()
        for _ in range(GOODBYE_STEPS):
            if not self.streams:
                return
            await asyncio.sleep(GOODBYE_S / GOODBYE_STEPS)

    def progress(self, name: str, order_id: str, done: float) -> None:
        """A device says how far it is with an order."""
        with contextlib.suppress(OrderClosed, UpdateRefused):
            self.book.order(name, order_id)
            self.streams.progress(name, done)

    async def trouble(self, name: str, order_id: str, reason: str) -> None:
        """A device says that it cannot carry out an order."""
        with contextlib.suppress(OrderClosed, UpdateRefused):
            self.book.order(name, order_id)
            await self.excuse(name, reason)

    async def shut_out(self, error_for: dict[str, AttuneError]) -> int:
        """Ends the streams of these devices, each with its error. Returns how many devices stay connected."""
        for name, error in error_for.items():
            stream = self.streams.get(name)
            if stream is not None:
                stream.close(error)
                await self.disconnect(stream)
                await self.excuse(name, str(error))
        return len(self.streams)

    # --- orders

    async def report(self, name: str, round_number: int) -> bool:
        """An update (or evaluation) of this device is durable in the inbox. False: too late, it does not count."""
        await self.dispatch(events.Reported(name, round_number, time.time()))
        return self._receipts.pop(name, False)

    # --- the plan

    async def _start_lab(self, plan: Plan) -> list[Slot]:
        """The slots of the state before round 1, if there is none yet."""
        started = await self.lab.start(plan, self._store.slots(), self.machine.record.round)
        self.max_bytes = started.max_bytes
        for name in started.remade:
            LOG.warning("%s was damaged; it was made again from the state before it, with the same bits", name)
        return started.slots

    async def _try_plan(self) -> bool:
        """False, and the server is told to stop, if no model fits both the settings and what the devices declared."""
        try:
            await self._make_plan()
        except AttuneError as error:
            self.error = error
            self.unusable.set()
        return self.error is None

    async def _make_plan(self) -> None:
        """Fixes the plan and makes the state before round 1 durable; then everyone who waits is told."""
        profiles = self.streams.profiles()
        plan = planning.make_plan(self.settings, profiles, self._federation)
        slots = await self._start_lab(plan)
        self._store.commit_round(self.machine.record, slots, [], {}, plan=plan)
        await self.lab.settle()
        self._plan = plan
        LOG.info("plan: %s with a %s, %d classes, %d devices", plan.method, plan.model.name, len(plan.classes), len(profiles))
        if why := planning.why_this_model(self.settings, plan):
            LOG.info("a %s, because %s", plan.model.name, why)
        for name in profiles:
            self._send_plan(name, plan)

    # --- the machine and its effects

    async def dispatch(self, event: events.Event) -> None:
        """One event after the other, each with all that follows from it."""
        async with self._turn:
            try:
                await self._handle(event)
            except Exception as error:
                self._fail(error)

    async def _handle(self, event: events.Event) -> None:
        before = self.machine.record.phase
        effects = self.machine.handle(event)
        if before is events.Phase.EVALUATING and self.machine.record.phase is not before:
            await self._commit_evaluation()
        self._save_record()
        await self._follow(effects)

    def _save_record(self) -> None:
        encoded = msgspec.json.encode(self.machine.record)
        if encoded != self._saved_record:
            self._store.put("record", self.machine.record)
            self._saved_record = encoded

    async def _follow(self, effects: list[events.Effect]) -> None:
        for effect in effects:
            match effect:
                case events.Receipt(name, accepted):
                    self._receipts[name] = accepted
                    if accepted and self.machine.record.phase is events.Phase.DONE:
                        await self._commit_evaluation()
                case events.Open(work, number, devices):
                    await self._orders.open(sorted(self.max_bytes), self.machine.record, work, number, devices)
                case events.Aggregate(number, cohort):
                    await self._aggregate(number, set(cohort))
                case events.Finish(devices):
                    self._finish(devices)
        self._set_timer()

    async def _aggregate(self, number: int, cohort: set[str]) -> None:
        """The commit point of a round: the new state, the record and the metrics become durable together."""
        found = await self._executors.disk(self.inbox.entries, "train", number)
        entries = {name: entry for name, entry in found.items() if name in self.machine.reported}  # others are late
        updates = {name: entry for name, entry in entries.items() if name in cohort}
        marks = self._orders.fetched(self.machine.record, entries, number - 1, "train")
        for name in updates:
            marks.setdefault(name, {})["contributed"] = number
        rows = [entry.row for entry in entries.values()]
        before = msgspec.json.encode(self.machine.record)
        try:
            if self.machine.record.adapting and self.settings.adaptation is not None:
                outcome = await self.lab.adapt(updates, self.settings.adaptation)
            else:
                outcome = await self.lab.aggregate(updates)
            effects = self.machine.handle(events.Aggregated(time.time()))
            self._store.commit_round(self.machine.record, outcome.slots, rows, marks)
        except Exception as error:
            # What is not committed did not happen: the record must not count a round whose state is not there.
            self.machine.record = msgspec.json.decode(before, type=events.Record)
            self._fail(error)
            return
        self._saved_record = msgspec.json.encode(self.machine.record)
        await self.lab.settle()
        rounds = self.settings.round.rounds
        which = f"round {number}/{rounds}" if number <= rounds else f"newcomers' round {number}"
        LOG.info("%s closed: %s", which, summary(rows, self.settings.method.evaluate))
        LOG.debug("round %d: %s", number, outcome.metrics)
        await self._follow(effects)
        # Last, while the devices are at work already: deleting what a cohort sent takes time, and a restart does it too.
        await self._executors.disk(self.inbox.clear, "train", number)

    async def _commit_evaluation(self) -> None:
        number = self.machine.record.round
        entries = await self._executors.disk(self.inbox.entries, "evaluate", number)
        if not entries:  # nobody answered, or it is committed already
            return
        rows = [entry.row for entry in entries.values()]
        marks = self._orders.fetched(self.machine.record, entries, number, "evaluate")
        self._store.commit_round(self.machine.record, [], rows, marks)
        await self._executors.disk(self.inbox.clear, "evaluate", number)
        LOG.info("state after round %d evaluated: %s", number, summary(rows, "served"))

    def _finish(self, devices: Iterable[str]) -> None:
        for name in devices:
            self.streams.send(name, events.Farewell(f"all {self.settings.round.rounds} rounds are done"))
        if self.machine.record.phase is events.Phase.DONE:  # else newcomers are given rounds of their own first
            self.finished.set()

    def _fail(self, error: Exception) -> None:
        """The step cannot be carried out: the reason is in the status, and a restart tries the same step again."""
        known = isinstance(error, AttuneError)
        LOG.error("failed: %s", error, exc_info=None if known else error)
        self.error = error if isinstance(error, AttuneError) else FederationFailed(f"{type(error).__name__}: {error}")
        self.machine.handle(events.Failed(str(self.error)))
        with contextlib.suppress(sqlite3.Error):  # what failed may be the disk itself
            self._save_record()
        self.finished.set()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = time.time()
        due = self.machine.next_wake(now)
        if due is not None:
            delay_s = max(0.0, due - now) + 0.01
            self._timer = asyncio.get_running_loop().call_later(delay_s, lambda: self._spawn(self._tick()))

    async def _tick(self) -> None:
        await self.dispatch(events.Tick(time.time()))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except Exception as error:
                self._fail(error)

        task = asyncio.get_running_loop().create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
