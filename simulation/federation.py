"""A federation on one event loop: the coordinator and the devices are those of the network; what joins them are calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attune.common.errors import AttuneError, FederationFailed
from attune.fedclient.address import ServerAddress
from attune.fedclient.console import Console
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.device import Device
from attune.fedclient.link.local import LocalLink
from attune.fedclient.messages import Result
from attune.fedclient.options import DeviceOptions
from attune.fedclient.work.inline import Cohorts, Executor, Inline
from attune.fedclient.work.processes.pool import Pool
from attune.fedclient.work.spread import Spread
from attune.fedclient.work.worker import Worker
from attune.fedserver.core import planning
from attune.fedserver.core.planning import ResolvedSettings
from attune.fedserver.executors import Inline as InlineExecutors
from attune.fedserver.federation.clock import Clock
from attune.fedserver.federation.coordinator import Coordinator
from attune.fedserver.federation.members import Members
from attune.fedserver.federation.updates import Updates
from attune.fedserver.lab.thread import ThreadLab
from attune.fedserver.ports.ledger import Certificate, Snapshot
from attune.fedserver.stores.uploads import Uploads
from attune.fedserver.web.serving import PageAddress
from attune.simulation.progress import Watcher, orders_of
from attune.simulation.server import InProcess
from attune.simulation.watching import watched
from attune.simulation.worlds import World

FEDERATION = "simulation"  # what a plan calls it; over the network this is the fingerprint of an authority
NOWHERE = ServerAddress("this process", 1)
FOREVER = 253370764800.0  # unix time at which a certificate ends that nobody asks for


@dataclass(frozen=True)
class Ended:
    """What a federation came to."""

    found: Snapshot
    reported: frozenset[str]
    troubles: Sequence[str]
    results: Mapping[str, Result]  # the last of each device


@dataclass
class Heard(Console):
    """The console of one device. Its lines are for people beside a device; here they are counted."""

    watcher: Watcher
    last: Result | None = None
    said: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Nobody sits there."""

    def result(self, result: Result) -> None:
        self.watcher.carried_out()

    def kept(self, message: str, result: Result, path: Path | None) -> None:
        self.last = result


class Federation:
    """Devices by name, each with its data; `common` has the options that are the same for all.

    overrides: the settings that were given. stopped: whether what is at work is to be given up. executor: of cohorts, or
    where the learners are; None: one order after the other. awake_bytes: what learners that wait may hold in memory.
    page: where it is served.
    """

    def __init__(
        self,
        shards: Mapping[str, LazyShard],
        overrides: Mapping[str, Any],
        common: DeviceOptions,
        world: World,
        watcher: Watcher,
        stopped: Callable[[], bool],
        executor: Executor | Pool | None,
        awake_bytes: float,
        page: PageAddress | None = None,
    ) -> None:
        self._shards, self._overrides, self._common = shards, overrides, common
        self._world, self._watcher, self._stopped = world, watcher, stopped
        self._executor, self._awake_bytes, self._page = executor, awake_bytes, page
        self._trouble: asyncio.Future[AttuneError] = asyncio.get_running_loop().create_future()

    async def run(self) -> Ended:
        """To the end. Errors: AttuneError of whoever could not go on."""
        ledger = self._world.storage.ledger
        try:
            settings = await self._settings()
            await self._enrol()
            coordinator = self._coordinator(settings)
            await coordinator.start()
            self._watcher.begin(orders_of(settings, len(self._shards), coordinator.round.record.round))
            try:
                with watched(self._page, coordinator, self._world):
                    results = await self._live(coordinator)
            finally:
                self._watcher.end()
                await coordinator.stop()
            found = await ledger.snapshot()
            reported = coordinator.inbox.names(*found.record.open_orders)
            return Ended(found, frozenset(reported), coordinator.troubles.lines, results)
        finally:
            await self._world.storage.close()

    async def _settings(self) -> ResolvedSettings:
        """What is set now, over what this federation was begun with. Errors: HomeMismatch, SettingError."""
        ledger = self._world.storage.ledger
        merged = planning.reconcile((await ledger.snapshot()).overrides, dict(self._overrides))
        settings = planning.resolve(merged)
        await ledger.set_overrides(merged)
        return settings

    async def _enrol(self) -> None:
        for name in sorted(self._shards):
            if await self._world.storage.ledger.device(name) is None:
                await self._world.storage.ledger.enrol(name, name, Certificate(name, name, "device", FOREVER), time.time())

    def _coordinator(self, settings: ResolvedSettings) -> Coordinator:
        """Its clock stands still: one thing is done after the other, so nobody is late and nothing runs out."""
        ledger, blobs, executors = self._world.storage.ledger, self._world.storage.blobs, InlineExecutors()
        lab = ThreadLab(blobs, executors, settings.server.threads or self._common.threads)
        return Coordinator(ledger, blobs, lab, settings, FEDERATION, executors, Clock(lambda: 0.0, stands=True))

    def _worker(self, coordinator: Coordinator) -> Worker:
        if self._executor is None:
            return Inline(self._stopped, self._awake_bytes)
        if isinstance(self._executor, Pool):
            return Spread(self._executor, self._awake_bytes, self._stopped, bounded=False)
        return Cohorts(self._stopped, self._awake_bytes, self._executor, lambda: len(coordinator.round.awaited))

    async def _live(self, coordinator: Coordinator) -> dict[str, Result]:
        """All devices, until each has its model."""
        with self._worker(coordinator) as worker:
            return await self._lived(coordinator, worker)

    async def _lived(self, coordinator: Coordinator, worker: Worker) -> dict[str, Result]:
        ledger, blobs = self._world.storage.ledger, self._world.storage.blobs
        members = Members(coordinator, ledger)
        updates = Updates(coordinator, members, Uploads(self._world.storage), ledger, InlineExecutors())
        server = InProcess(members, updates, coordinator, blobs, self._troubled, worker.look)
        consoles = {name: Heard(self._watcher) for name in self._shards}
        lives = [
            asyncio.create_task(
                Device(self._common, shard, self._world.stores[name], LocalLink(name, server), consoles[name], worker).run()
            )
            for name, shard in self._shards.items()
        ]
        failure = asyncio.create_task(self._failure(coordinator))
        whole: asyncio.Future[Any] = asyncio.gather(*lives)
        try:
            await asyncio.wait([whole, failure], return_when=asyncio.FIRST_COMPLETED)
            if failure.done():
                raise failure.result()
            await whole
        finally:
            for task in (*lives, failure):
                task.cancel()
            await asyncio.gather(*lives, failure, whole, return_exceptions=True)
        return {name: console.last for name, console in consoles.items() if console.last is not None}

    def _troubled(self, name: str, reason: str) -> None:
        if not self._trouble.done():
            self._trouble.set_result(FederationFailed(f"{name}: {reason}"))

    async def _failure(self, coordinator: Coordinator) -> AttuneError:
        """What keeps the federation from its end, as soon as there is something."""
        finished, unusable = (asyncio.ensure_future(each.wait()) for each in (coordinator.finished, coordinator.unusable))
        planless = coordinator.planless  # nobody else comes, with whom there could be a plan
        waits: set[asyncio.Future[Any]] = {self._trouble, finished, unusable, planless}
        try:
            while not (self._trouble.done() or planless.done()) and coordinator.error is None:
                _, waits = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            finished.cancel()
            unusable.cancel()
        return coordinator.error or (planless if planless.done() else self._trouble).result()
