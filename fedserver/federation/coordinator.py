"""Performs what the round decides: one event at a time through the pure step, then its effects.

fedserver.core.round decides; fedserver.lab.engine works on tensors, on its own thread. This file keeps the order in which
things become true: first durable, then known.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING

import msgspec

from attune.common.errors import AttuneError, FederationFailed, OrderClosed, UpdateRefused
from attune.common.plan import Plan, Profile
from attune.fedserver.core import messages as events
from attune.fedserver.core import planning
from attune.fedserver.core.accuracy import summary
from attune.fedserver.core.planning import ResolvedSettings
from attune.fedserver.core.round import left_s, next_wake, step
from attune.fedserver.core.state import Round
from attune.fedserver.executors import Executors
from attune.fedserver.federation.clock import Clock
from attune.fedserver.federation.orders import Orders
from attune.fedserver.federation.streams import Stream, Streams
from attune.fedserver.home import Home
from attune.fedserver.stores.inbox import Inbox
from attune.fedserver.stores.sqlite import Store

if TYPE_CHECKING:
    from attune.fedserver.lab.engine import Engine

LOG = logging.getLogger("fedserver")
NOTHING_PERSONAL = "method {} keeps nothing of a device's own: newcomers get the common model as it is"
GOODBYE_S, GOODBYE_STEPS = 10.0, 100


class Coordinator:
    """The federation on the event loop: who is connected, which orders are out, and what is durable."""

    def __init__(
        self,
        home: Home,
        store: Store,
        settings: ResolvedSettings,
        federation: str,
        executors: Executors,
        clock: Clock = Clock(),  # noqa: B008 - it is immutable
    ) -> None:
        self.settings = settings
        self.finished = asyncio.Event()  # done, or failed
        self.unusable = asyncio.Event()  # the settings fit no model: nothing can be done before they are changed
        self.error: AttuneError | None = None
        self.inbox = Inbox(home.inbox)
        self.streams = Streams(store)
        self._orders = Orders(settings, store, self.streams, executors)
        self.book = self._orders.book
        self._home, self._store, self._federation, self._executors = home, store, federation, executors
        saved = store.get("plan")
        self._plan: Plan | None = msgspec.convert(saved, Plan) if saved else None
        self._engine: Engine | None = None
        self._receipts: dict[str, bool] = {}
        self._turn = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        record = store.record()
        self._saved_record: events.Record | None = None
        self._clock = clock
        self.rules = settings.rules
        self.round = Round.of(record, self._reported(record), self._finished(record))

    def __repr__(self) -> str:
        return f"Coordinator({self.round.record.phase} round={self.round.record.round}, {self.streams!r})"

    @property
    def engine(self) -> Engine:
        """There is one as soon as there is a plan, and so before any order."""
        assert self._engine is not None  # noqa: S101
        return self._engine

    def _reported(self, record: events.Record) -> set[str]:
        """Who has answered the open orders: from the inbox, or after the end from the evaluation that was committed."""
        if record.revive().phase is events.Phase.DONE:
            return {row.client for row in self._store.rows() if (row.work, row.round) == ("evaluate", record.round)}
        return set(self.inbox.entries(*record.open_orders))

    def _finished(self, record: events.Record) -> set[str]:
        """Who has evaluated the end, or what adaptations have made of it where they change what everybody is served."""
        rounds = self.rules.settings.rounds
        first = max(record.round, rounds) if self.rules.common else rounds
        return {row.client for row in self._store.rows() if row.work == "evaluate" and row.round >= first}

    async def start(self) -> None:
        """Takes up the step at which the last process stopped."""
        await self._executors.disk(self.inbox.clear_except, *self.round.record.open_orders)
        if self._plan is not None:
            await self._make_engine(self._plan)
        async with self._turn:
            await self._handle(events.Resumed(self._clock.monotonic()))
        if self.round.record.phase is events.Phase.DONE:
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
            await self._handle(events.Connected(stream.name, self._clock.monotonic(), newcomer=self._is_newcomer(stream.name)))
        self._tell_who_waits(stream)

    def _is_newcomer(self, name: str) -> bool:
        device = self._store.device(name)
        return device is None or not device.contributed

    def _send_plan(self, name: str, plan: Plan) -> None:
        self.streams.send(name, events.Welcome(plan))

    def _tell_who_waits(self, stream: Stream) -> None:
        record = self.round.record
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
            await self.dispatch(events.Disconnected(stream.name, self._clock.monotonic()))

    async def excuse(self, name: str, reason: str) -> None:
        """The round does not wait for this device any longer; the reason is shown to the operator."""
        LOG.warning("%s: %s", name, reason)
        self._store.update_device(name, note=reason[:500])
        await self.dispatch(events.Excused(name, self._clock.monotonic()))

    async def goodbye(self) -> None:
        """Until the federation is done or has failed, and the devices that were told have hung up (or had time to)."""
        await self.finished.wait()
        for _ in range(GOODBYE_STEPS):
            if not self.streams:
                return
            await asyncio.sleep(GOODBYE_S / GOODBYE_STEPS)

    async def progress(self, name: str, order_id: str, done: float) -> None:
        """A device says how far it is with an order."""
        with contextlib.suppress(OrderClosed, UpdateRefused):
            self.book.order(name, order_id)
            self.streams.progress(name, done)
            await self.dispatch(events.Progressed(name, self._clock.monotonic()))

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

    async def report(self, order: events.OrderId) -> bool:
        """The update (or evaluation) for this order is durable in the inbox. False: too late, it does not count."""
        reported = events.Reported(order.client, order.round, self._clock.monotonic(), order.work)
        await self.dispatch(reported)
        if order.client not in self._receipts:
            # What follows from it could not be made durable. The update is: the round as it stands says what it is worth.
            taken = step(self.rules, self.round, reported, self._clock.unix())
            self.round = taken.state
            return events.Receipt(order.client, accepted=True) in taken.effects
        return self._receipts.pop(order.client)

    # --- the plan

    async def _make_engine(self, plan: Plan) -> None:
        def make() -> Engine:
            import torch

            from attune.fedserver.lab.engine import Engine

            torch.set_num_threads(self.settings.server.threads or max(1, (os.cpu_count() or 2) - 1))
            return Engine(plan, slots, self._home.state, self._home.serve, closed)

        slots, closed = self._store.slots(), self.round.record.round
        self._engine = await self._executors.worker(make)

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
        await self._make_engine(plan)
        self._store.commit_round(self.round.record, self.engine.staged_slots(), [], {}, plan=plan)
        await self._executors.worker(self.engine.settle)
        self._plan = plan
        LOG.info("plan: %s with a %s, %d classes, %d devices", plan.method, plan.model.name, len(plan.classes), len(profiles))
        if why := planning.why_this_model(self.settings, plan):
            LOG.info("a %s, because %s", plan.model.name, why)
        for name in profiles:
            self._send_plan(name, plan)

    # --- events and their effects

    async def dispatch(self, event: events.Event) -> None:
        """One event after the other, each with all that follows from it."""
        async with self._turn:
            try:
                await self._handle(event)
            except Exception as error:
                self._fail(error)

    async def _handle(self, event: events.Event) -> None:
        before, taken = self.round.record, step(self.rules, self.round, event, self._clock.unix())
        record = taken.state.record
        if before.phase is events.Phase.EVALUATING and record.phase is not before.phase:
            await self._commit_evaluation(record)
        self._save_record(record)
        self.round = taken.state
        await self._follow(taken.effects)

    def _save_record(self, record: events.Record) -> None:
        if record != self._saved_record:
            self._store.put("record", record)
            self._saved_record = record

    async def _follow(self, effects: Iterable[events.Effect]) -> None:
        for effect in effects:
            match effect:
                case events.Receipt(name, accepted):
                    self._receipts[name] = accepted
                    if accepted and self.round.record.phase is events.Phase.DONE:
                        await self._commit_evaluation(self.round.record)
                case events.Open(work, number, devices):
                    span_s = left_s(self.rules, self.round, self._clock.monotonic())
                    await self._orders.open(self.engine, self.round.record, span_s, work, number, devices)
                case events.Aggregate(number, cohort):
                    await self._aggregate(number, set(cohort))
                case events.Finish(devices):
                    self._finish(devices)
        self._set_timer()

    async def _aggregate(self, number: int, cohort: set[str]) -> None:
        """The commit point of a round: the new state, the record and the metrics become durable together."""
        found = await self._executors.disk(self.inbox.entries, "train", number)
        entries = {name: entry for name, entry in found.items() if name in self.round.reported}  # others are late
        updates = {name: entry for name, entry in entries.items() if name in cohort}
        marks = self._orders.fetched(self.round.record, entries, number - 1, "train")
        for name in updates:
            marks.setdefault(name, {})["contributed"] = number
        rows = [entry.row for entry in entries.values()]
        try:
            if self.round.record.adapting and self.settings.adaptation is not None:
                metrics = await self._executors.worker(self.engine.adapt, updates, self.settings.adaptation)
            else:
                metrics = await self._executors.worker(self.engine.aggregate, updates)
            taken = step(self.rules, self.round, events.Aggregated(self._clock.monotonic()), self._clock.unix())
            self._store.commit_round(taken.state.record, self.engine.staged_slots(), rows, marks)
        except Exception as error:
            self._fail(error)  # what is not committed did not happen: the state is still the one before
            return
        self.round, self._saved_record = taken.state, taken.state.record
        await self._executors.worker(self.engine.settle)
        rounds = self.settings.round.rounds
        which = f"round {number}/{rounds}" if number <= rounds else f"newcomers' round {number}"
        LOG.info("%s closed: %s", which, summary(rows, self.settings.method.evaluate))
        LOG.debug("round %d: %s", number, metrics)
        await self._follow(taken.effects)
        # Last, while the devices are at work already: deleting what a cohort sent takes time, and a restart does it too.
        await self._executors.disk(self.inbox.clear, "train", number)

    async def _commit_evaluation(self, record: events.Record) -> None:
        number = record.round
        entries = await self._executors.disk(self.inbox.entries, "evaluate", number)
        if not entries:  # nobody answered, or it is committed already
            return
        rows = [entry.row for entry in entries.values()]
        marks = self._orders.fetched(record, entries, number, "evaluate")
        self._store.commit_round(record, [], rows, marks)
        await self._executors.disk(self.inbox.clear, "evaluate", number)
        LOG.info("state after round %d evaluated: %s", number, summary(rows, "served"))

    def _finish(self, devices: Iterable[str]) -> None:
        for name in devices:
            self.streams.send(name, events.Farewell(f"all {self.settings.round.rounds} rounds are done"))
        if self.round.record.phase is events.Phase.DONE:  # else newcomers are given rounds of their own first
            self.finished.set()

    def _fail(self, error: Exception) -> None:
        """The step cannot be carried out: the reason is in the status, and a restart tries the same step again."""
        known = isinstance(error, AttuneError)
        LOG.error("failed: %s", error, exc_info=None if known else error)
        self.error = error if isinstance(error, AttuneError) else FederationFailed(f"{type(error).__name__}: {error}")
        self.round = step(self.rules, self.round, events.Failed(str(self.error))).state
        with contextlib.suppress(sqlite3.Error):  # what failed may be the disk itself
            self._save_record(self.round.record)
        self.finished.set()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._clock.monotonic()
        due = next_wake(self.rules, self.round, now)
        if due is not None:
            delay_s = max(0.0, due - now) + 0.01
            self._timer = asyncio.get_running_loop().call_later(delay_s, lambda: self._spawn(self._tick()))

    async def _tick(self) -> None:
        await self.dispatch(events.Tick(self._clock.monotonic()))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except Exception as error:
                self._fail(error)

        task = asyncio.get_running_loop().create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
