"""A federation on one event loop: the coordinator and the devices are those of the network, but calls join them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from attune.common.errors import AttuneError, FederationFailed, SettingError
from attune.common.plan import MAIN
from attune.common.protocol import SPENT
from attune.common.text import clean
from attune.fedclient.address import ServerAddress
from attune.fedclient.console import Console
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.device import Device
from attune.fedclient.messages import OrderResult
from attune.fedclient.options import DeviceOptions
from attune.fedclient.work.executor import Executor
from attune.fedclient.work.processes.remote_executor import RemoteExecutor, RemoteWorker
from attune.fedclient.work.worker import Worker
from attune.fedserver.consent import code_in, code_of
from attune.fedserver.core import planning
from attune.fedserver.core.buffered_rounds import check_arrivals
from attune.fedserver.core.messages import Phase, Record
from attune.fedserver.core.planning import ResolvedSettings
from attune.fedserver.core.records import Arrival
from attune.fedserver.core.state import Round
from attune.fedserver.executors import InlineExecutors
from attune.fedserver.federation.coordinator import Coordinator
from attune.fedserver.federation.federation_state import FederationState
from attune.fedserver.federation.steps import Clock, InlineTurns
from attune.fedserver.lab.thread import ThreadLab
from attune.fedserver.ports.lab import NO_VARIANTS
from attune.fedserver.ports.ledger import Certificate, Snapshot
from attune.seams import Watch
from attune.simulation.in_process import CohortWorker, InlineWorker, InProcessServer, LocalLink
from attune.simulation.progress import Watcher, orders_of
from attune.simulation.simulated_clock import ClockedWorker, SimulatedClock
from attune.simulation.simulation_state import SimulationState

FEDERATION = "simulation"  # the federation's name in a plan; over the network it is the fingerprint of an authority
NOWHERE = ServerAddress("this process", 1)
FOREVER = 253370764800.0  # unix time at which the certificates of the simulation expire; they are never checked


@dataclass(frozen=True)
class FederationOutcome:
    """State of a finished federation.

    Attributes:
        snapshot: The server's ledger at the end.
        reported: Devices that have answered the open orders.
        troubles: Lines about what went wrong.
        results: The last result of each device.
    """

    snapshot: Snapshot
    reported: frozenset[str]
    troubles: Sequence[str]
    results: Mapping[str, OrderResult]


@dataclass
class CountingConsole(Console):
    """Console of one simulated device. It prints no lines; it counts orders, and keeps the last result."""

    watcher: Watcher
    last: OrderResult | None = None
    said: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        """No-op: nobody reads the lines of a simulated device."""

    def progress(self, what: str, done: float) -> None:
        """No-op, as `say`."""

    def result(self, result: OrderResult) -> None:
        self.watcher.order_done()

    def kept(self, message: str, result: OrderResult, path: Path | None) -> None:
        self.last = result


class Federation:
    """Server and devices of a simulation.

    Args:
        shards: Data of each device, by its name.
        overrides: Settings that were given.
        common: Options of all devices.
        state: Storage of the server and of the devices.
        watcher: Shows the progress.
        stopped: Returns whether the work must be given up.
        executor: Executor of cohorts, or the pool of processes with the learners. None: one order after the other.
        awake_bytes: Most bytes that waiting learners may hold in memory.
        page: The dashboard, if it is served.
        until: Stop after this round and its evaluation. A later federation with the same state goes on from there. None: run
            all rounds.
        clock: The time that devices take. None: no time passes, and all devices of a buffered round take equally long.
        variants: Variant of the model of each device that has one.
    """

    def __init__(
        self,
        shards: Mapping[str, LazyShard],
        overrides: Mapping[str, Any],
        common: DeviceOptions,
        state: SimulationState,
        watcher: Watcher,
        stopped: Callable[[], bool],
        executor: Executor | None,
        awake_bytes: float,
        page: Watch | None = None,
        until: int | None = None,
        clock: SimulatedClock | None = None,
        variants: Mapping[str, str] = NO_VARIANTS,
    ) -> None:
        self._options = {name: replace(common, variant=variants.get(name, MAIN)) for name in shards}
        self._shards, self._overrides, self._common = shards, overrides, common
        self._state, self._watcher, self._stopped = state, watcher, stopped
        self._executor, self._awake_bytes, self._page, self._clock = executor, awake_bytes, page, clock
        self._spent: set[str] = set()
        self._late: dict[str, tuple[int, asyncio.Event]] = {}  # devices that join later: the round, and when they may
        self._fewest = 1
        self._until, self._stopped_there = until, asyncio.Event()
        self._trouble: asyncio.Future[AttuneError] = asyncio.get_running_loop().create_future()

    async def run(self) -> FederationOutcome:
        """Run the federation to its end, or to the round after which it stops.

        Raises:
            AttuneError: The server or a device cannot go on.
        """
        ledger = self._state.storage.ledger
        try:
            settings = await self._settings()
            if settings.round.mode == "buffered" and self._clock is None:
                self._clock = SimulatedClock()
            if self._clock is not None and self._executor is not None:
                raise SettingError(
                    "devices on a simulated clock, as in buffered rounds, work one by one: leave the executor out"
                )
            if self._clock is not None and self._clock.arrivals is not None:
                settings = self._repeating(settings, self._clock.arrivals)
            self._fewest = max(1, settings.round.quorum or settings.round.min_clients)
            before = await ledger.snapshot()
            if self._is_there(before.record):
                return FederationOutcome(before, frozenset(), [], {})
            for name in sorted(self._shards.keys() - self._late.keys()):
                await self._enrol(name)
            coordinator = self._coordinator(settings)
            await coordinator.start()
            if self._is_there(coordinator.state.round.record):  # the last answers were durable already, and no other one comes
                self._stopped_there.set()
            self._watcher.begin(orders_of(settings, len(self._shards), coordinator.state.round.record.round))
            try:
                page = self._page(coordinator, self._state.storage) if self._page else nullcontext()
                with page, self._worker(coordinator.state) as worker:
                    results = await self._run_devices(coordinator, worker)
            finally:
                self._watcher.end()
                await coordinator.stop()
            snapshot = await ledger.snapshot()
            reported = coordinator.state.inbox.names(*snapshot.record.open_orders)
            return FederationOutcome(snapshot, frozenset(reported), coordinator.state.troubles.lines, results)
        finally:
            await self._state.storage.close()

    async def _settings(self) -> ResolvedSettings:
        """Return the given settings, merged over those that this federation was begun with.

        Raises:
            HomeMismatch: A given setting differs from a recorded one that may not change.
            SettingError: A setting is wrong.
        """
        ledger = self._state.storage.ledger
        snapshot = await ledger.snapshot()
        if unknown := sorted(code_of(snapshot) - code_in(self._overrides)):
            raise SettingError(
                f"the simulation in this home was begun with code of its own, {clean(unknown[0])}: if you trust it, give the "
                "same model and settings again"
            )
        merged = planning.reconcile(snapshot.overrides, dict(self._overrides))
        settings = replace(planning.resolve(merged), until=self._until)
        await ledger.set_overrides(merged)
        return settings

    def _is_there(self, record: Record) -> bool:
        """Return whether the round after which this federation stops is closed and evaluated."""
        if self._until is None or record.round < self._until:
            return False
        return record.round > self._until or record.revive().phase is Phase.WAITING

    def _repeating(self, settings: ResolvedSettings, arrivals: Sequence[Arrival]) -> ResolvedSettings:
        """Return the settings with which the log of an earlier run is repeated, and note which devices join later.

        Raises:
            SettingError: Rounds are synchronous, or the log cannot be followed.
        """
        if settings.round.mode != "buffered":
            raise SettingError('only buffered rounds have an order of arrivals: set round.mode = "buffered", as in the run')
        check_arrivals(arrivals, self._shards.keys(), settings.round.rounds)
        for arrival in arrivals:
            if not arrival.founder:
                self._late.setdefault(arrival.device, (arrival.order, asyncio.Event()))
        round_ = msgspec.structs.replace(settings.round, min_clients=len(self._shards) - len(self._late), take_back=0.0)
        return replace(settings, round=round_, arrivals=arrivals)

    def _joined(self, round_: Round) -> bool:
        """Let devices join whose first order is due. Return whether all of them are there."""
        due = {name: may for name, (first, may) in self._late.items() if first <= round_.record.round + 1}
        for may in due.values():
            may.set()
        return due.keys() <= round_.connected | round_.finished

    async def _live(self, name: str, device: Device) -> None:
        """Run a device, from when it may join."""
        if name in self._late:
            await self._late[name][1].wait()
            await self._enrol(name)
        await device.run()

    async def _enrol(self, name: str) -> None:
        if await self._state.storage.ledger.device(name) is None:
            await self._state.storage.ledger.enrol(name, name, Certificate(name, name, "device", FOREVER), time.time())

    def _coordinator(self, settings: ResolvedSettings) -> Coordinator:
        """Make the coordinator. No order expires on its clock, and no device is late if it stands still."""
        executors = InlineExecutors()
        device = settings.server.device
        if device == "auto" and self._common.device != "mps":  # aggregators need float64, which MPS has not
            device = self._common.device
        lab = ThreadLab(self._state.storage.blobs, executors, settings.server.threads or self._common.threads, device=device)
        simulated = self._clock
        clock = Clock(lambda: 0.0 if simulated is None else simulated.now, stands=True)
        state = FederationState(self._state.storage, lab, settings, executors, clock, InlineTurns())
        return Coordinator(state, FEDERATION, one_owner=True)

    def _worker(self, state: FederationState) -> Worker:
        if self._clock is not None:

            def held() -> dict[str, str] | None:
                round_ = state.round
                if round_.record.phase is Phase.AGGREGATING or not self._joined(round_):
                    return None
                return {name: str(round_.record.order_of(name)) for name in round_.awaited | round_.training}

            return ClockedWorker(self._stopped, self._awake_bytes, self._clock, held, lambda: state.round.record.round)
        if self._executor is None:
            return InlineWorker(self._stopped, self._awake_bytes)
        if isinstance(self._executor, RemoteExecutor):
            return RemoteWorker(self._executor, self._awake_bytes, self._stopped, bounded=False)
        return CohortWorker(self._stopped, self._awake_bytes, self._executor, lambda: len(state.round.awaited))

    async def _run_devices(self, coordinator: Coordinator, worker: Worker) -> dict[str, OrderResult]:
        """Run all devices until each has its model, and return the last result of each."""

        def answered() -> None:
            worker.answered()
            if self._is_there(coordinator.state.round.record):
                self._stopped_there.set()

        server = InProcessServer(coordinator, self._fail, answered)
        consoles = {name: CountingConsole(self._watcher) for name in self._shards}
        devices = {
            name: Device(self._options[name], shard, self._state.stores[name], LocalLink(name, server), consoles[name], worker)
            for name, shard in self._shards.items()
        }
        lives = [asyncio.create_task(self._live(name, device)) for name, device in devices.items()]
        failure, stop = asyncio.create_task(self._failure(coordinator)), asyncio.create_task(self._stopped_there.wait())
        whole: asyncio.Future[Any] = asyncio.gather(*lives)
        try:
            await asyncio.wait([whole, failure, stop], return_when=asyncio.FIRST_COMPLETED)
            if failure.done():
                raise failure.result()
            if not stop.done():
                await whole
        finally:
            for task in (*lives, failure, stop):
                task.cancel()
            await asyncio.gather(*lives, failure, stop, whole, return_exceptions=True)
        return {name: console.last for name, console in consoles.items() if console.last is not None}

    def _fail(self, name: str, reason: str) -> None:
        """End the simulation for a device's trouble. One whose privacy budget is spent is missed only if too few are left."""
        if reason == SPENT:
            self._spent.add(name)
            if len(self._shards) - len(self._spent) >= self._fewest:
                return
        if not self._trouble.done():
            self._trouble.set_result(FederationFailed(f"{name}: {reason}"))

    async def _failure(self, coordinator: Coordinator) -> AttuneError:
        """Wait for an error that keeps the federation from its end, and return it."""
        finished, unusable = (asyncio.ensure_future(event.wait()) for event in (coordinator.finished, coordinator.unusable))
        planless = coordinator.planner.planless  # if no plan is possible now, none ever will be: no other device joins
        waits: set[asyncio.Future[Any]] = {self._trouble, finished, unusable, planless}
        try:
            while not (self._trouble.done() or planless.done()) and coordinator.error is None:
                _, waits = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            finished.cancel()
            unusable.cancel()
        return coordinator.error or (planless if planless.done() else self._trouble).result()
