"""The federation on the event loop: events go through the pure round one after the other, and what it decides is carried out.

fedserver.core.round decides; the lab works on tensors, on its own thread. This file keeps the order in which things become
true: first durable, then known. Nothing of it runs inside a peer's call (fedserver.federation.steps).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from attune.common.errors import AttuneError, CertificateRefused, FederationFailed
from attune.common.exchange.messages import Farewell, Notice, Welcome, WorkName
from attune.common.faults import SERVER, fail_at
from attune.common.plan import FEWEST_DEVICES, Plan, Profile
from attune.common.protocol import SUMS
from attune.common.task import TASKS, TaskName
from attune.fedserver.core import messages as events
from attune.fedserver.core import planning
from attune.fedserver.core.accuracy import summary
from attune.fedserver.core.advice import for_devices
from attune.fedserver.core.policy import often_taken_back
from attune.fedserver.core.round import left_s, next_wake, step
from attune.fedserver.core.state import Round
from attune.fedserver.executors import Executors
from attune.fedserver.federation.device_activity import DeviceActivity, DeviceStage
from attune.fedserver.federation.early_end import likeliest_and_last
from attune.fedserver.federation.exchanger import ExchangeAccount
from attune.fedserver.federation.masked_survey import MaskedSurvey
from attune.fedserver.federation.rounds import ClosedRound, OrderSender, RoundCloser, taken_up
from attune.fedserver.federation.secure_rounds import SecureRounds
from attune.fedserver.federation.steps import Clock, PassedOver, Troubles, Turns
from attune.fedserver.federation.streams import RevokedDevices, Streams
from attune.fedserver.ports.blobs import Blobs, Damaged
from attune.fedserver.ports.lab import Lab
from attune.fedserver.ports.ledger import Ledger, Snapshot
from attune.fedserver.stores.inbox import Inbox, check_age

LOG = logging.getLogger("fedserver")
REVOKED = "the operator of this federation has revoked {}"
PLANNING = "making the plan"  # the name of a trouble
T = TypeVar("T")


class Coordinator:
    """Federation on the event loop: connected devices, open orders, and what is durable."""

    def __init__(
        self,
        ledger: Ledger,
        blobs: Blobs,
        lab: Lab,
        settings: planning.ResolvedSettings,
        federation: str,
        executors: Executors,
        clock: Clock = Clock(),  # noqa: B008 - it is immutable
        one_owner: bool = False,
        turns: Turns | None = None,
    ) -> None:
        """Take over the parts of a federation. `one_owner`: all devices are of one person, as in a simulation."""
        self.ready = asyncio.Event()  # orders are out: what answers them can be taken in
        self.finished = asyncio.Event()  # done, or failed
        self.unusable = asyncio.Event()  # something is damaged: nothing can be done before it is restored
        self.error: AttuneError | None = None
        self.planless: asyncio.Future[AttuneError] = asyncio.get_running_loop().create_future()  # once no plan could be made
        self.turns, self.streams, self.troubles, self.revoked = turns or Turns(), Streams(), Troubles(), RevokedDevices()
        self.turns.met = self.troubles.met
        self.inbox, self.lab, self.activity = Inbox(blobs), lab, DeviceActivity(clock.unix)
        self.plan: Plan | None = None
        self.profiles: Mapping[str, Profile] = {}  # of the devices for which this process made the plan
        self.direct = ""  # address of the S3 store with which devices may exchange blobs themselves
        self.round, self._run = Round(), ""  # the name of the run; empty: the first
        self.max_bytes: Mapping[str, int] = {}  # part that devices hand in -> the largest blob that can be an answer
        self.fewest = 1 if one_owner else FEWEST_DEVICES  # devices whose statistics are combined for others
        self.settings, self._rules, self.clock, self._federation = settings, settings.rules, clock, federation
        self._ledger, self._blobs, self._executors = ledger, blobs, executors
        self._orders = OrderSender(settings, ledger, self.streams, lab, blobs, executors, self.activity, self.fewest)
        self.book, self._passed_over = self._orders.book, PassedOver(ledger, self.troubles)
        account = ExchangeAccount(settings.round, lambda: self.round, self.turns, self.handle)
        self.secure = SecureRounds(settings.privacy, federation, self.streams, clock, self.turns, self.handle, account)
        self.masked = MaskedSurvey(settings.privacy, federation, self.streams, blobs, executors, clock, account)
        self._closer = RoundCloser(settings, self.inbox, lab, self._orders, executors, self.secure)
        self._closing_since: float | None = None  # monotonic; while updates are aggregated
        self._saved_record: events.Record | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"Coordinator({self.round.record.phase} round={self.round.record.round}, {self.streams!r})"

    async def start(self) -> None:
        """Continue the step at which the last process stopped. Errors are those of `restore` and `resume`."""
        await self.resume(await self.restore())

    async def restore(self) -> Snapshot:
        """Read the durable state, without tensors. Devices may connect from now on; they are welcomed after `resume`.

        Raises:
            HomeMismatch: The ledger is older than the state.
        """
        await self._ledger.disconnect_all(self.clock.unix())
        snapshot = await self._ledger.snapshot()
        await self._executors.disk(check_age, self._blobs, snapshot.record.round)
        self.round = await taken_up(snapshot, self._rules, self.inbox, self._executors)
        for device in snapshot.devices:
            if device.revoked:  # maybe while no server ran
                self.revoked.add(device.name, CertificateRefused(REVOKED.format(device.name)))
                await self._executors.disk(self.inbox.discard, self.round.record.order_of(device.name))
                self.round = self.round.expelling(device.name)
        self.plan, self._run = snapshot.plan, snapshot.run
        return snapshot

    def resume(self, snapshot: Snapshot) -> asyncio.Future[None]:
        """Start the first turn: the lab loads its state, which may take seconds, then the interrupted step continues.

        The turn is requested at once, so events of devices come after it. Only the returned future raises the lab's errors for
        a damaged state.
        """
        return self.turns.start(self.turns.take(lambda: self._resume(snapshot)))

    async def _resume(self, snapshot: Snapshot) -> None:
        if snapshot.plan is not None:
            started = await self.lab.start(snapshot.plan, snapshot.slots, snapshot.record.round)
            self.max_bytes = started.max_bytes
            for name in started.remade:
                LOG.warning("%s was damaged; it was made again from the round before, with the same bits", name)
        await self._or_fail(self.handle(events.Resumed(self.clock.monotonic())))
        if self.round.record.phase is events.Phase.DONE and self.settings.until is None:
            self.finished.set()
        self.ready.set()

    async def stop(self) -> None:
        """Stop the work under way. A restart continues it."""
        if self._timer is not None:
            self._timer.cancel()
        await self.turns.stop()

    # --- answers

    async def report(self, order: events.OrderId, loss: float | None = None) -> bool:
        """Tell the round that the update or evaluation for this order is durable in the inbox.

        Returns:
            Whether it counts; False if it is late.
        """
        event = events.Reported(order.client, order.round, self.clock.monotonic(), order.work, loss)
        counts = await self.turn(self.handle, event)
        if counts is None:
            # A later step has failed, but the update is durable. So the present round decides whether it counts.
            taken = step(self._rules, self.round, event, self.clock.unix())
            self.round, counts = taken.state, events.Acknowledge(order.client, accepted=True) in taken.effects
        if (stage := self.activity.stage(order.client)) is not None and stage is not DeviceStage.ABSENT:
            self.activity.enter(order.client, DeviceStage.WAITING)
        return counts

    async def pause(self, on: bool) -> None:
        """Hold back further training rounds, or let them open again. The change is durable when this returns."""
        await self.dispatch(events.Paused(on, self.clock.monotonic()))
        LOG.info("paused: the open round goes on to its end, and no other opens" if on else "no longer paused")

    async def expel(self, name: str) -> None:
        """Continue the round without a revoked device, and remove its update from the inbox. The caller must have the turn."""
        before, disk = self.round.record, self._executors.disk
        self._orders.count_votes_anew()
        await self.handle(events.Expelled(name, self.clock.monotonic()))
        # An aggregation under way is not started again, and it still reads this update.
        if before.phase is not events.Phase.AGGREGATING or name not in before.cohort:
            await self.troubles.overcome("expelling a device", lambda: disk(self.inbox.discard, before.order_of(name)))

    # --- the plan

    async def try_plan(self, profiles: Mapping[str, Profile]) -> bool:
        """Make a plan, and return whether there is one now. Data that fit no model do not end the server; missing code does."""
        try:
            await self._make_plan(profiles)
        except AttuneError as error:
            if isinstance(error.__cause__, ImportError):
                raise
            self.cannot_begin(error)
            return False
        self.troubles.clear(PLANNING)
        return True

    def cannot_begin(self, error: AttuneError) -> None:
        """Tell the connected devices that no plan can be made of their data, and wait for other devices."""
        self.troubles.set(PLANNING, str(error))
        for name in self.streams.profiles():
            self.streams.send(name, Notice(f"the server cannot begin: {for_devices(error)}"))
        if not self.planless.done():
            self.planless.set_result(error)

    async def _make_plan(self, profiles: Mapping[str, Profile]) -> None:
        """Fix the plan, make the state before round 1 durable, and tell all waiting devices."""
        scales, sums = self.masked.common, [name for name in profiles if self.streams.can(name, SUMS)]
        plan = planning.make_plan(self.settings, profiles, self._federation, self._run, self.fewest, scales, sums)
        started = await self.troubles.overcome("making the first state", lambda: self.lab.start(plan, [], 0))
        plan, record = planning.pinned(plan, started.body_digest), self.round.record
        await self.troubles.overcome("writing the plan", lambda: self._ledger.commit_round(record, started.slots, [], {}, plan))
        fail_at(SERVER, 0, "plan-committed")
        await self.lab.settle()
        self.plan, self.profiles, self.max_bytes = plan, profiles, started.max_bytes
        LOG.info("plan: %s with a %s, %d classes, %d devices", plan.method, plan.model.name, len(plan.classes), len(profiles))
        for line in planning.notes_on(plan, self.settings):
            LOG.info("%s", line)
        for why in self.settings.what_liars_can(len(profiles)) if self.fewest > 1 else ():
            LOG.warning("%s", why)
        for name in profiles:
            self.streams.send(name, self.welcome(plan))

    def welcome(self, plan: Plan) -> Welcome:
        """Return what a device is told first."""
        return Welcome(msgspec.json.encode(plan), self.settings.server.inline_bytes, True, self.direct)

    # --- events and their effects

    async def dispatch(self, event: events.Event) -> bool:
        """Handle one event with everything that follows from it. Return whether an update that it reports counts."""
        return await self.turn(self.handle, event) or False

    async def turn(self, work: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T | None:
        """Run `work(*arguments)` in a separate turn. Its errors fail the federation's step and do not reach the caller."""
        return await self.turns.take(lambda: self._or_fail(work(*arguments)))

    async def _or_fail(self, work: Coroutine[Any, Any, T]) -> T | None:
        try:
            return await work
        except Exception as error:
            await self._fail(error)
            return None

    async def handle(self, *happened: events.Event) -> bool:
        """Take one step, and return whether a reported update counts.

        The caller must have the turn. Decisions become durable first, then known, and then they are carried out. For several
        events, such as devices that connect at once, the orders are made together.
        """
        before, state = self.round.record, self.round
        effects: list[events.Effect] = []
        for event in happened:
            taken = step(self._rules, state, event, self.clock.unix())
            state = taken.state
            effects += taken.effects
        record = state.record
        if before.phase is events.Phase.EVALUATING and record.phase is not before.phase:
            await self._commit_evaluation(record)
        await self._save_record(record)
        self.round = state
        if record.phase is events.Phase.DONE and before.phase is not record.phase:
            await self.lab.forget(record.oldest_kept)
        self.troubles.show("opening a round", self._rules.policy.refuses(state))
        self.troubles.show("closing a round", self._rules.policy.lacks(state))
        return await self._follow(events.together(effects))

    async def _save_record(self, record: events.Record) -> None:
        if record != self._saved_record:
            await self.troubles.overcome("writing the record", lambda: self._ledger.put_record(record))
            self._saved_record = record
            fail_at(SERVER, record.round, "record-written")

    async def _follow(self, effects: Iterable[events.Effect]) -> bool:
        """Carry out effects, and return whether a reported update counts."""
        counts = False
        for effect in effects:
            match effect:
                case events.Acknowledge(_, accepted):
                    counts = accepted
                    if accepted and self.round.record.phase is events.Phase.DONE:
                        await self._commit_evaluation(self.round.record)
                case events.Open(work, number, devices):
                    await self._open(work, number, devices)
                case events.Aggregate(number, cohort):
                    self.turns.start(self._close_round(number, frozenset(cohort)))
                case events.GoBack(number):
                    self.turns.start(self._close_round(number, frozenset(), effect))
                case events.FinishDevices(devices):
                    self._finish(devices)
                case events.PassOver(devices, work):
                    await self._passed_over.pass_over(devices, work)
                case events.AskAgain(devices, work):
                    await self._passed_over.ask_again(devices, work)
                case events.DiscardStale(name, age):
                    self.streams.send(name, Notice(await self._passed_over.too_stale(name, age, self.settings.round)))
        self._set_timer()
        return counts

    async def _open(self, work: WorkName, number: int, devices: Sequence[str]) -> None:
        # If the clock stands, devices work one after the other and none is late. 0 means no deadline.
        span_s = 0.0 if self.clock.stands else left_s(self._rules, self.round, self.clock.monotonic())
        await self.troubles.overcome(
            f"opening round {number}",
            lambda: self._orders.open(self.task, sorted(self.max_bytes), self.round.record, span_s, work, number, devices),
        )

    async def _close_round(self, number: int, cohort: frozenset[str], back: events.GoBack | None = None) -> None:
        """Aggregate, or go back, without a turn, so that devices come and go meanwhile. Commit in a turn."""
        self._closing_since = self.clock.monotonic()
        self.book.withdraw(self.round.training)
        what = f"closing round {number}"
        try:
            closing = await self.troubles.overcome(what, lambda: self._closer.make(self.round, number, cohort, back, self._run))
        except Exception as error:
            await self.turn(self._fail, error)
            return
        finally:
            self._closing_since = None
        if not await self.turn(self._commit, closing):
            return  # the step has failed: what the cohort sent stays for the next try
        # Deleting takes time, so it is last, while the devices already work. A restart does it too.
        kept, disk = self.round.record.kept_orders, self._executors.disk
        await self.troubles.overcome("clearing the inbox", lambda: disk(self.inbox.clear, number, kept))
        fail_at(SERVER, number, "inbox-cleared")

    async def _commit(self, closing: ClosedRound) -> bool:
        """Commit a round: the new state, the record and the metrics become durable together. Return True."""
        done, before, trying = closing.outcome, self.round.record, f"committing round {closing.number}"
        ending = before.likeliest, before.last
        if self.settings.round.patience and not before.last and not closing.setback:
            ending = await self.troubles.overcome(trying, lambda: likeliest_and_last(self._ledger, self.settings, before))
        event = events.Aggregated(self.clock.monotonic(), closing.setback, done.weight, closing.summed, *ending)
        taken = step(self._rules, self.round, event, self.clock.unix())
        record, commit = taken.state.record, self._ledger.commit_round
        await self.troubles.overcome(trying, lambda: commit(record, done.slots, closing.rows, closing.marks))
        self.activity.close_round(closing.number)
        fail_at(SERVER, closing.number, "committed")
        self.round, self._saved_record = taken.state, record
        await self.lab.settle(sorted(taken.state.training))
        await self.lab.forget(record.oldest_kept)
        fail_at(SERVER, closing.number, "settled")
        number, rounds = closing.number, record.last or self.settings.round.rounds
        which = f"round {number}/{rounds}" if number <= rounds else f"newcomers' round {number}"
        LOG.info("%s closed: %s", which, summary(closing.rows, self.settings.method.evaluate, TASKS[self.task].metric))
        LOG.debug("round %d: %s", number, done.metrics)
        if closing.setback:
            LOG.warning("round %d counts for nothing: %s", number, closing.setback)
        self.troubles.show("taking the state back", often_taken_back(record, self.clock.unix()))
        await self._passed_over.bounded(number, done.bounded, done.without_vote)
        await self._follow(taken.effects)
        return True

    @property
    def task(self) -> TaskName:
        """Task of the plan, or "classes" without a plan."""
        return self.plan.task if self.plan else "classes"

    async def _commit_evaluation(self, record: events.Record) -> None:
        number, disk = record.round, self._executors.disk
        step_name = f"committing the evaluation after round {number}"
        entries = await self.troubles.overcome(step_name, lambda: disk(self.inbox.entries, "evaluate", number))
        if not entries:  # nobody answered, or it is committed already
            return
        rows = [entry.row for entry in entries.values()]
        marks = await self.troubles.overcome(step_name, lambda: self._orders.fetched(record, entries, number, "evaluate"))
        await self.troubles.overcome(step_name, lambda: self._ledger.commit_round(record, [], rows, marks))
        fail_at(SERVER, number, "evaluation-committed")
        await self.troubles.overcome(step_name, lambda: disk(self.inbox.clear_evaluation, number, list(entries)))
        LOG.info("state after round %d evaluated: %s", number, summary(rows, "served", TASKS[self.task].metric))

    def _finish(self, devices: Iterable[str]) -> None:
        for name in devices if self.settings.until is None else ():  # else not all runs of a race are over
            self.streams.send(name, Farewell(f"all {self.round.record.last or self.settings.round.rounds} rounds are done"))
        if self.round.record.phase is events.Phase.DONE and self.settings.until is None:
            self.finished.set()  # else newcomers are given rounds of their own first

    async def _fail(self, error: Exception) -> None:
        """Record that the step failed. The status has the reason, and a restart tries the same step again.

        After damage this process ends, because something must be restored first; so it does if a package must be installed.
        """
        LOG.error("failed: %s", error, exc_info=None if isinstance(error, AttuneError) else error)
        self.error = error if isinstance(error, AttuneError) else FederationFailed(f"{type(error).__name__}: {error}")
        self.round = step(self._rules, self.round, events.StepFailed(str(self.error)), self.clock.unix()).state
        with contextlib.suppress(Exception):  # what failed may be the ledger itself
            await self._ledger.put_record(self.round.record)
            self._saved_record = self.round.record
        self.finished.set()
        if isinstance(error, Damaged) or isinstance(error.__cause__, ImportError):
            self.unusable.set()

    # --- time

    @property
    def stuck_s(self) -> float:
        """Seconds since the present step began; 0 if no step is under way."""
        closing_s = 0.0 if (since := self._closing_since) is None else self.clock.monotonic() - max(since, self.secure.moved_at)
        return max(self.turns.busy_s, closing_s)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.clock.stands:
            return
        now = self.clock.monotonic()
        if (due := next_wake(self._rules, self.round, now)) is not None:
            call_later, dispatch, clock = asyncio.get_running_loop().call_later, self.dispatch, self.clock.monotonic
            self._timer = call_later(max(0.0, due - now) + 0.01, lambda: self.turns.start(dispatch(events.Tick(clock()))))
