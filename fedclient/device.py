"""One device at work: performs the session's decisions, over the given link and store, until the federation is over.

Three things run at once: the control stream, the order at hand (download, train, commit) or the hand-in of its result, and
the loop that feeds their events to the session and performs its effects. Tensors are computed by a fedclient.work.worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import random
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from attune.common import aio
from attune.common.errors import AttuneError, DiskFull, HomeMismatch, NoModel, Replaced, TooMany, Unreachable, WireError
from attune.common.exchange.messages import Hello, Order
from attune.common.faults import fail_at
from attune.common.models.options import cautions
from attune.common.plan import LIGHT, Plan, closed_form_words, fitting_words, run_name, score_words, standardisation
from attune.common.text import from_json
from attune.fedclient import messages, session
from attune.fedclient.console import Console
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.disclosing import Discloser, hello_of, tell_units
from attune.fedclient.exchanges import Exchanges, book_of, exchanges_of
from attune.fedclient.gate import Gate
from attune.fedclient.limits import accept_plan
from attune.fedclient.link.port import FINAL, Broken, Link
from attune.fedclient.options import DeviceOptions
from attune.fedclient.resource_limits import until_met
from attune.fedclient.store import Store
from attune.fedclient.work.executor import Cancelled, HostLost, Work
from attune.fedclient.work.worker import LearnerSlot, OrderInProgress, Worker

FULL = "the disk of this device is full: free some space there, then start it again"
PROGRESS_S, RENEWAL_LOOK_S = 1.0, 10.0  # between two checks whether to renew the certificate, which may live a minute


class Device:
    """Runner of one device: performs what the session decides."""

    def __init__(
        self, options: DeviceOptions, shard: LazyShard, store: Store, link: Link, console: Console, worker: Worker
    ) -> None:
        self.options, self.shard, self.store, self.link = options, shard, store, link
        self.console, self.worker = console, worker
        self.session = session.Session(connect_timeout_s=options.connect_timeout_s, stay=options.stay)
        self.events: asyncio.Queue[messages.Event | BaseException] = asyncio.Queue(64)
        for event in options.woken_by:
            self.events.put_nowait(event)
        self.job: OrderInProgress | None = None  # the session has one order at hand at most
        self.slot: LearnerSlot | None = None  # once there is a plan
        self.discloser = Discloser(options, shard, store, link, worker, console.say)
        self.exchanges: Exchanges | None = None  # if the plan has secure aggregation
        self.gate = Gate(options)  # of the plan that is accepted
        self.last_contact, self.last_progress = time.monotonic(), 0.0
        self.empty = False  # nothing of the run is left here, and the server is told
        self.tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> Path | None:
        """Run until the model is kept, and return its path if it is in files.

        A device that stays keeps the model of every run and waits for the next one.

        Raises:
            AttuneError: The error that ended it.
        """
        try:
            self.stream = self._spawn(self._stream(0.0))
            self._spawn(self._keep_renewed())
            while True:
                event = await self._next_event()
                if isinstance(event, BaseException):
                    raise event
                for effect in self.session.on(event):
                    if isinstance(effect, messages.Keep) and not self.options.stay:
                        return await self._keep(effect.message)
                    await self._perform(effect)
        finally:
            self._stop_job()
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)
            await self.link.close()

    async def _next_event(self) -> messages.Event | BaseException:
        while self.options.rest_s:
            with contextlib.suppress(TimeoutError):
                async with aio.timeout(self.options.rest_s):
                    return await self.events.get()
            if self.link.open.is_set() and len(self.tasks) <= 2:  # the stream, and the look at the certificate
                raise messages.Rested(self.session, await self._hello())
        return await self.events.get()

    async def _hello(self) -> Hello:
        book = await asyncio.to_thread(book_of, self.store)
        return hello_of(self.options, self.shard, self.empty, not book.samples)

    async def _perform(self, effect: messages.Effect) -> None:
        match effect:
            case messages.Say(text):
                self.console.say(text)
            case messages.Keep(text):
                await self._keep(text)
                self.console.say("waiting for the next run of this federation")
            case messages.Prepare(plan_json):
                await self._prepare(plan_json)
            case messages.Start(order):
                self._start(order)
            case messages.Extend(order):
                self._set_deadline(order)
            case messages.Send(order_id, resume):
                self.job = OrderInProgress(self._spawn(self._send(order_id, resume)))
            case messages.Exchange(message) if message.of_statistics:
                self._spawn(self.discloser.exchange(message, self.gate))
            case messages.Exchange(message) if self.exchanges is not None:
                self._spawn(self.exchanges.answer(message, self._ready()))
            case messages.Disclose(question):
                self._spawn(self.discloser.answer(question, self.gate))
            case messages.StopWork() | messages.StopSending():
                self._stop_job()
            case messages.ReportTrouble(order_id, reason):
                self.link.trouble(order_id, self.gate.reason(reason))
            case messages.Reconnect(after_s):
                self.stream = self._spawn(self._stream(after_s))
            case messages.AskForModel():
                self.empty = True
                self.stream.cancel()
            case messages.GiveUp(reason):
                raise Unreachable(f"{reason} (gave up {self.options.connect_timeout_s:g} s after the last contact)")
            case messages.Yield(reason):
                raise Replaced(
                    f"another process uses the identity of this device ({reason}), so this one ends. If that was not you, "
                    f"{self.store.where} was copied: have this device revoked on the server, and enrol every device by itself"
                )
            case messages.Refuse(reason):
                raise HomeMismatch(reason)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task of this device. An unplanned end of the task ends the device with its error."""
        task = asyncio.create_task(self._guard(work))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            await self.events.put(error)

    async def _stream(self, after_s: float) -> None:
        """Wait `after_s` with jitter, then keep one control stream until it ends."""
        await asyncio.sleep(after_s * random.uniform(0.5, 1.0))  # noqa: S311 (jitter, so that devices do not reconnect at once)
        opened_at: float | None = None

        async def handle(event: messages.Event) -> None:
            nonlocal opened_at
            self.last_contact = time.monotonic()
            opened_at = opened_at or self.last_contact
            self.discloser.heard(event)
            await self.events.put(event)

        try:
            await self._renew()
            await self.link.control(await self._hello(), handle)
        except Replaced as replaced:
            lived_s = 0.0 if opened_at is None else time.monotonic() - opened_at
            await self.events.put(messages.Displaced(str(replaced), lived_s))
        except Broken as broken:
            now = time.monotonic()
            if opened_at is not None:
                self.last_contact = now
            reason = str(broken)
            if broken.connecting and opened_at is None:
                reason = await self.link.diagnosis()
            lived_s = 0.0 if opened_at is None else now - opened_at
            await self.events.put(messages.Broke(reason, now - self.last_contact, lived_s))

    async def _keep_renewed(self) -> None:
        """Renew the certificate while a stream is open. Without a stream, the next connection renews it."""
        while self.link.renews:
            await asyncio.sleep(RENEWAL_LOOK_S)
            if self.link.open.is_set():
                with contextlib.suppress(Broken):
                    await self._renew()

    async def _renew(self) -> None:
        try:
            if await self.link.renew():
                self.console.say("renewed this device's certificate")
        except TooMany as refused:
            self.console.say(f"cannot renew this device's certificate yet: {refused}")
        except Broken as broken:
            if broken.connecting:
                raise
            # The old certificate is good for another third of its life; the next connection asks again.
            self.console.say(f"cannot renew this device's certificate yet: {broken}")

    async def _prepare(self, plan_json: bytes) -> None:
        try:
            plan = from_json(plan_json, Plan)
        except msgspec.DecodeError as error:
            raise WireError(f"the server sent a plan that this version cannot read ({error}); update one of the two") from None
        gate = Gate(self.options, plan)
        try:
            before = accept_plan(plan, self.store, self.options)
            here = self.options.plan_here(plan)
            await self.worker.do(self.options.limits.check_plan, here, self.shard.profile.samples)
            self.options.privacy.check_plan(plan, self.shard.profile.samples)
            if before is not None:
                await self._leave(before, plan)
            else:  # a process that left another run for this one may have been killed on the way
                await self.worker.do(self.store.take_back, plan)
            self.exchanges = exchanges_of(plan, self.options, self.store, self.link, self.worker, self.console.say)
            make = functools.partial(
                self.worker.make_learner, here, self.shard, self.link.name, self.store.orders, self.options
            )
            slot = await self.worker.do(LearnerSlot, self.link.name, self.worker.learners, make)
        except AttuneError as error:  # it ends this device; the server's operator must know it too
            await self.link.decline(gate.declined(error))
            raise
        # Keep the plan only after the model was built: a home must not be bound to a plan that cannot work.
        self.store.keep("plan", plan_json)
        fail_at(slot.orders.who, 0, "plan-kept")
        if self.slot is None:
            if (profile := self.shard.profile).columns is not None or profile.targets is not None:
                self.console.say(standardisation(plan))
            inputs = fitting_words(here.model, profile.shape, profile.column_names)
            for words in filter(None, (inputs, closed_form_words(plan), score_words(plan), self.options.shared_words(plan))):
                self.console.say(words)
            await tell_units(gate, self.shard, self.link, self.worker, self.console.say)
            if self.options.variant == LIGHT:
                self.console.say("a light device: by the closed form alone, without networks")
            elif plan.variants:
                self.console.say(f"trains the variant {self.options.variant} of the model: a {here.model.name}")
            if self.options.fits_alone and (why := self.options.against_alone(plan)):
                self.console.say(why)
            for warning in (*cautions(here.model.name, here.model.options), *slot.orders.damage):
                self.console.say(f"warning: {warning}")
        await self.discloser.describe(gate, plan_json)
        self.slot, self.gate = slot, gate
        self.session.finished = slot.newest.order_id if slot.newest is not None else None

    async def _leave(self, before: Plan, plan: Plan) -> None:
        """Put aside what this device has of the last run, because the federation goes on with another one."""
        old, new = run_name(before.run), run_name(plan.run)
        kept = await self.worker.do(self._put_aside, old, bool(plan.given))
        self.slot = None
        place = await self.worker.do(self.store.take_back, plan)
        begins = f"goes on here from what was kept in {place}" if place else f"begins, with {plan.method}"
        self.console.say(f"the run {new} of this federation {begins}; what there is of {old} is kept in {kept}")

    def _put_aside(self, run: str, keeps_model: bool) -> str:
        newest = self.store.orders(self.link.name).newest()
        return self.store.put_aside(run, newest.sequence if newest is not None else 0, keeps_model)

    def _start(self, order: Order) -> None:
        newest = self._ready().newest
        done = self.store.spent() + (newest.sequence if newest is not None else 0)
        self.gate.check_sums(order)
        self.options.limits.check_orders(done)
        self.job = OrderInProgress(self._spawn(self._work(order, stop := threading.Event())), stop)
        self._set_deadline(order)

    def _set_deadline(self, order: Order) -> None:
        """End the present job when the order's deadline, counted from now, or the device's own limit has passed."""
        if self.job is None:
            return
        if self.job.deadline is not None:
            self.job.deadline.cancel()
        left_s = max(0.0, self.options.limits.order_s - (time.monotonic() - self.job.begun))
        expired = messages.Expired(order.id)
        after_s = min(order.deadline_s or left_s, left_s)
        if after_s < math.inf:  # a simulated device has no limit
            self.job.deadline = asyncio.get_running_loop().call_later(after_s, lambda: self._spawn(self.events.put(expired)))

    def _stop_job(self) -> None:
        if self.job is not None:
            if self.job.deadline is not None:
                self.job.deadline.cancel()
            self.job.stop.set()
            self.job.task.cancel()
            self.job = None

    async def _work(self, order: Order, stop: threading.Event) -> None:
        try:
            await until_met(self.options.resources.when, self.console.say)
            async with self.worker.turn:
                result = await self._result_of(order, stop)
        except Cancelled:
            return
        except DiskFull:  # it ends this device; the server's operator must know why
            with contextlib.suppress(OSError):  # a message is noted in the home before it is sent
                await self.link.decline(FULL)
            raise
        except FINAL:
            raise
        except Exception as error:
            # An error in one order (memory, numbers, a user's model) costs this round, but does not end the device.
            await self.events.put(messages.WorkFailed(order.id, str(error) or type(error).__name__))
            return
        self.console.result(result)
        await self.events.put(messages.WorkDone(order.id))

    async def _result_of(self, order: Order, stop: threading.Event) -> messages.OrderResult:
        slot = self._ready()
        try:
            while True:
                try:
                    return await self._carried_out(slot, order, stop)
                except HostLost as lost:
                    self.console.say(f"{lost}: doing this again")
                    slot.drop()
                except messages.SmallerFormUnusable as unfit:
                    self.console.say(f"{unfit}: fetching it as it is")
                    order = order.whole
        finally:
            slot.release()

    async def _carried_out(self, slot: LearnerSlot, order: Order, stop: threading.Event) -> messages.OrderResult:
        from attune.fedclient.link.transfer import fetch, together

        learner = slot.take()
        if learner is None:
            learner = await self.worker.do(slot.learner)
        missing = learner.missing(order)
        if self.options.resources.disk_bytes:
            coming_bytes = learner.size_bytes + sum(ref.sent.size for ref, _ in missing)
            await self.worker.do(self.store.check_room, self.options.resources, coming_bytes)
        tensors = await together([fetch(self.link, ref, expected, self.console.say) for ref, expected in missing])
        fail_at(slot.orders.who, order.round, "order-fetched")
        fetched = {ref.digest: parts for (ref, _), parts in zip(missing, tensors, strict=True)}
        bytes_down = sum([ref.sent.size for ref, _ in missing])
        progress = self._progress_of(order)
        return await self.worker.carry_out(Work(learner, order, fetched, bytes_down, progress, stop.is_set))

    def _progress_of(self, order: Order) -> Any:
        loop, name = asyncio.get_running_loop(), f"round {order.round}"

        def tell(done: float) -> None:
            self.console.progress(name, done)
            self.link.progress(order.id, done)

        def progress(done: float) -> None:
            now = time.monotonic()
            if now - self.last_progress >= PROGRESS_S:
                self.last_progress = now
                with contextlib.suppress(RuntimeError):  # the loop is closed: the device is ending
                    loop.call_soon_threadsafe(tell, done)

        return progress

    async def _send(self, order_id: str, resume: bool) -> None:
        from attune.fedclient.link.transfer import send

        slot = self._ready()
        result = slot.newest
        if result is None or result.order_id != order_id:
            return
        result = self.gate.report(result)
        sent = await send(self.link, slot.orders, result, resume, self.console.say)
        fail_at(slot.orders.who, result.round, "submitted")
        await self.events.put(sent)

    async def _keep(self, message: str) -> Path | None:
        slot = self.slot
        if slot is None or slot.newest is None:
            raise NoModel(
                f"the federation is over ({message}) without a model for this device: restore {self.store.where} from a backup"
            )
        path = await self.worker.do(self._save, slot)
        fail_at(slot.orders.who, slot.newest.round, "model-saved")
        self.console.kept(message, slot.newest, path)
        return path

    def _save(self, slot: LearnerSlot) -> Path | None:
        from attune.fedclient.model.model_info import finished_model

        try:
            plan = self.gate.plan
            if plan is not None and plan.given and (plan.matrix or self.store.has_model):
                self.console.say("this device keeps the model that it had")
                return None
            return self.store.keep_model(*finished_model(slot.learner(), self.shard.profile.column_names))
        finally:
            slot.release()

    def _ready(self) -> LearnerSlot:
        if self.slot is None:
            raise AttuneError("an order was started before the plan was known")
        return self.slot
