"""The federation on the event loop: events go through the pure round one after the other, and what it decides is carried out.

fedserver.core.round decides; the lab works on tensors, on its own thread. This file keeps the order in which things become
true: first durable, then known. Nothing of it runs inside a peer's call (fedserver.federation.steps).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from functools import partial

from attune.common.errors import AttuneError, FederationFailed
from attune.common.exchange.messages import Farewell, Notice
from attune.common.faults import SERVER, fail_at
from attune.common.plan import FEWEST_DEVICES
from attune.fedserver.core import messages as events
from attune.fedserver.core.round import next_wake, step
from attune.fedserver.federation.closing import RoundCloser
from attune.fedserver.federation.federation_state import FederationState
from attune.fedserver.federation.members import Members
from attune.fedserver.federation.opening import OrderSender
from attune.fedserver.federation.planner import Planner
from attune.fedserver.federation.secure_rounds import SecureRounds
from attune.fedserver.federation.steps import PassedOver
from attune.fedserver.federation.survey import Survey
from attune.fedserver.federation.updates import Updates
from attune.fedserver.ports.blobs import Damaged
from attune.fedserver.ports.ledger import Snapshot

LOG = logging.getLogger("fedserver")


class Coordinator:
    """Federation on the event loop: what happens changes its state, in one turn after the other.

    Args:
        state: The state, which the handlers share.
        federation: The federation's name, as in a plan.
        one_owner: All devices are of one person, as in a simulation.

    Attributes:
        ready: Orders are out: what answers them can be taken in.
        finished: The federation is done, or has failed.
        unusable: Something is damaged: nothing can be done before it is restored.
        error: Why it has failed.
    """

    def __init__(self, state: FederationState, federation: str, *, one_owner: bool = False) -> None:
        self.state = state
        self.error: AttuneError | None = None
        self.ready, self.finished, self.unusable = asyncio.Event(), asyncio.Event(), asyncio.Event()
        state.turns.failed = self._fail
        fewest = 1 if one_owner else FEWEST_DEVICES
        self.secure = SecureRounds(state, federation, self.handle)
        self.survey = Survey(state, federation, self.handle)
        self.planner, self._orders = Planner(state, federation, fewest, self.survey), OrderSender(state, fewest)
        self.members = Members(state, self.handle, self.planner, self._orders, self.secure, self.survey)
        self.updates = Updates(state, self.handle, self.members.excuse, self.secure)
        self._passed_over = PassedOver(state.storage.ledger, state.troubles)
        self._closer = RoundCloser(state, self._orders, self.secure, self._passed_over, self._follow)
        self._timer: asyncio.TimerHandle | None = None
        self._one_owner = one_owner
        self._told: dict[int, dict[str, str]] = {}  # the round after which it is true -> what each site is worth

    async def start(self) -> None:
        """Continue the step at which the last process stopped. Errors are those of `FederationState.restore` and `resume`."""
        await self.resume(await self.state.restore())

    def resume(self, snapshot: Snapshot) -> asyncio.Future[None]:
        """Start the first turn: the lab loads its state, which may take seconds, then the interrupted step continues.

        The turn is requested at once, so devices that connect meanwhile are welcomed after it. Only the returned future raises
        the lab's errors for a damaged state.
        """
        return self.state.turns.start(self.state.turns.take(lambda: self._resume(snapshot)))

    async def _resume(self, snapshot: Snapshot) -> None:
        state = self.state
        if snapshot.plan is not None:
            self.planner.variants.update(snapshot.variants)
            started = await state.lab.start(snapshot.plan, snapshot.slots, snapshot.record.round, snapshot.variants)
            state.max_bytes = started.max_bytes
            for name in started.remade:
                LOG.warning("%s was damaged; it was made again from the round before, with the same bits", name)
        await state.turns.or_failed(self.handle, events.Resumed(state.clock.monotonic()))
        if state.round.record.phase is events.Phase.DONE and state.settings.until is None:
            self.finished.set()
        self.ready.set()

    async def stop(self) -> None:
        """Stop the work under way. A restart continues it."""
        if self._timer is not None:
            self._timer.cancel()
        await self.state.turns.stop()

    async def pause(self, on: bool) -> None:
        """Hold back further training rounds, or let them open again. The change is durable when this returns."""
        await self.state.turns.step(self.handle, events.Paused(on, self.state.clock.monotonic()))
        LOG.info("paused: the open round goes on to its end, and no other opens" if on else "no longer paused")

    # --- events and their effects

    async def handle(self, *happened: events.Event) -> bool:
        """Take one step, and return whether a reported update counts.

        The caller must have the turn. Decisions become durable first, then known, and then they are carried out. For several
        events, such as devices that connect at once, the orders are made together.
        """
        state, before = self.state, self.state.round.record
        after = state.round
        effects: list[events.Effect] = []
        for event in happened:
            taken = step(state.rules, after, event, state.clock.unix())
            after = taken.state
            effects += taken.effects
        record = after.record
        if before.phase is events.Phase.EVALUATING and record.phase is not before.phase:
            await self._closer.commit_evaluation(record)
        await self._save_record(record)
        state.round = after
        if record.phase is events.Phase.DONE and before.phase is not record.phase:
            await state.lab.forget(record.oldest_kept)
        state.troubles.show("opening a round", state.rules.policy.refuses(after))
        state.troubles.show("closing a round", state.rules.policy.lacks(after))
        return await self._follow(events.together(effects))

    async def _save_record(self, record: events.Record) -> None:
        if record != self.state.saved:
            await self.state.troubles.overcome("writing the record", partial(self.state.storage.ledger.put_record, record))
            self.state.saved = record
            fail_at(SERVER, record.round, "record-written")

    async def _follow(self, effects: Iterable[events.Effect]) -> bool:
        """Carry out effects, and return whether a reported update counts."""
        state, counts = self.state, False
        for effect in effects:
            match effect:
                case events.Acknowledge(_, accepted):
                    counts = accepted
                    if accepted and state.round.record.phase is events.Phase.DONE:
                        await self._closer.commit_evaluation(state.round.record)
                case events.Open(work, number, devices):
                    await self._orders.open(work, number, devices)
                case events.Aggregate(number, cohort):
                    state.turns.start(self._closer.close(number, frozenset(cohort)))
                case events.GoBack(number):
                    state.turns.start(self._closer.close(number, frozenset(), effect))
                case events.FinishDevices(devices):
                    await self._finish(devices)
                case events.PassOver(devices, work):
                    await self._passed_over.pass_over(devices, work)
                case events.AskAgain(devices, work):
                    await self._passed_over.ask_again(devices, work)
                case events.DiscardStale(name, age):
                    state.streams.send(name, Notice(await self._passed_over.too_stale(name, age, state.settings.round)))
        self._set_timer()
        return counts

    async def _finish(self, devices: Iterable[str]) -> None:
        if self.state.settings.until is not None:
            return  # not all runs of a race are over
        record, rounds = self.state.round.record, self.state.settings.round.rounds
        over, worths = f"all {record.last or rounds} rounds are done" if rounds else "evaluated", await self._worths()
        for name in devices:
            self.state.streams.send(name, Farewell("; ".join([over, *filter(None, [worths.get(name)])])))
        if record.phase is events.Phase.DONE:
            self.finished.set()  # else newcomers are given rounds of their own first

    async def _worths(self) -> dict[str, str]:
        """Return what each site is told of its worth to the others: the same until another round is closed."""
        if self._one_owner or (record := self.state.round.record).phase is not events.Phase.DONE:
            return {}
        if record.round not in self._told:
            try:
                self._told = {record.round: await self.state.lab.worths()}
            except AttuneError as error:
                LOG.warning("no site is told what it is worth to the others: %s", error)
                self._told = {record.round: {}}
        return self._told[record.round]

    async def _fail(self, error: Exception) -> None:
        """Record that the step failed. The status has the reason, and a restart tries the same step again.

        After damage this process ends, because something must be restored first; so it does if a package must be installed.
        """
        LOG.error("failed: %s", error, exc_info=None if isinstance(error, AttuneError) else error)
        state = self.state
        self.error = error if isinstance(error, AttuneError) else FederationFailed(f"{type(error).__name__}: {error}")
        state.round = step(state.rules, state.round, events.StepFailed(str(self.error)), state.clock.unix()).state
        with contextlib.suppress(Exception):  # what failed may be the ledger itself
            await state.storage.ledger.put_record(state.round.record)
            state.saved = state.round.record
        self.finished.set()
        if isinstance(error, Damaged) or isinstance(error.__cause__, ImportError):
            self.unusable.set()

    # --- time

    @property
    def stuck_s(self) -> float:
        """Seconds since the present step began; 0 if no step is under way."""
        return max(self.state.turns.busy_s, self._closer.busy_s)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        state = self.state
        if state.clock.stands:
            return
        now = state.clock.monotonic()
        if (due := next_wake(state.rules, state.round, now)) is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due - now) + 0.01, self._tick)

    def _tick(self) -> None:
        turns = self.state.turns
        turns.start(turns.step(self.handle, events.Tick(self.state.clock.monotonic())))
