"""The lab on one thread of this process. torch is imported there, by the first job."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from attune.common.methods.method import PartKind
from attune.common.plan import Plan
from attune.common.wire.blobs import Blob
from attune.fedserver.core.adaptation import AdaptationSpec
from attune.fedserver.core.records import AcceptedUpdate, Slot, Smaller
from attune.fedserver.executors import Executors
from attune.fedserver.lab.cluster.location import THIS_PROCESS, LabLocation
from attune.fedserver.ports.blobs import Blobs
from attune.fedserver.ports.lab import NO_VARIANTS, Arrived, RoundOutcome, Served, Started

if TYPE_CHECKING:
    from attune.fedserver.core.collector import Unmasking
    from attune.fedserver.lab.build import Maker
    from attune.fedserver.lab.cluster.worker_pool import WorkerPool
    from attune.fedserver.lab.engine import Engine


class ThreadLab:
    """Implements fedserver.ports.lab.Lab.

    Args:
        blobs: The blobs of the federation.
        executors: Its threads.
        threads: How many threads one job's computations use; 0: all cores but one.
        max_model_bytes: The largest model of a new federation; 0: no limit.
        device: The processor of large products (server.device).
        location: Place where rounds are computed.
    """

    def __init__(
        self,
        blobs: Blobs,
        executors: Executors,
        threads: int = 0,
        max_model_bytes: int = 0,
        device: str = "cpu",
        location: LabLocation = THIS_PROCESS,
    ) -> None:
        self._blobs, self._executors, self._max_model_bytes = blobs, executors, max_model_bytes
        self._threads = threads or max(1, (os.cpu_count() or 2) - 1)
        self._device, self._location = location.device(device), location
        self._pool: WorkerPool | None = None
        self._engine: Engine | None = None

    async def connect(self) -> int:
        """Connect before anything else, and return the number of workers; 0: this process does all work.

        Raises:
            SettingError: The cluster cannot be reached.
        """
        if self._location.is_here:
            return 0
        self._pool = await self._executors.worker(self._connect)
        return len(self._pool.members)

    def _connect(self) -> WorkerPool:
        from attune.fedserver.lab.cluster.ray_cluster import connect

        return connect(self._location, self._threads)

    async def close(self) -> None:
        """Release the workers after the present job."""
        if self._pool is not None:
            await self._executors.worker(self._pool.close)

    async def start(self, plan: Plan, slots: Sequence[Slot], closed: int, variants: Mapping[str, str] = NO_VARIANTS) -> Started:
        return await self._executors.worker(self._start, plan, slots, closed, variants)

    def _start(self, plan: Plan, slots: Sequence[Slot], closed: int, variants: Mapping[str, str]) -> Started:
        import torch

        from attune.fedserver.lab import accelerator
        from attune.fedserver.lab.recovery import take_up

        torch.set_num_threads(self._threads)
        accelerator.use(self._device)
        if not slots:
            from attune.common.methods.fit import NO_PRIVACY, check_model
            from attune.common.methods.registry import configured_in
            from attune.fedserver.lab.declared import check_size

            for spec in (plan.model, *plan.variants.values()):
                if self._max_model_bytes:
                    check_size(spec, self._max_model_bytes)
                check_model(spec, configured_in(plan), plan.seed, plan.privacy or NO_PRIVACY)
        self._engine, remade = take_up(plan, slots, self._blobs, closed, self._maker(), variants)
        return Started(self._engine.max_bytes(), self._engine.staged_slots(), remade, self._engine.body_digest)

    def _maker(self) -> Maker:
        if self._pool is None:
            from attune.fedserver.lab.build import made

            return made
        from attune.fedserver.lab.cluster.cluster_carrier import cluster_maker

        return cluster_maker(self._pool)

    async def serve(
        self, clients: Sequence[str], founders: Sequence[str] = (), version: int | None = None, solved: bool = True
    ) -> Served:
        if version is not None:
            return await self._executors.worker(self._started.serve_again, clients, founders, solved, version)
        return await self._executors.worker(self._started.serve, clients, founders, solved)

    async def describe(self, client: str, description: Sequence[float]) -> bool:
        return await self._executors.worker(self._started.told.take, {client: description})

    async def vary(self, variants: Mapping[str, str]) -> None:
        await self._executors.worker(self._started.vary, variants)

    async def cold_start(self, clients: Sequence[str]) -> Served:
        return await self._executors.worker(self._started.cold_start, clients)

    async def pack(self, blobs: Sequence[Blob]) -> dict[str, Blob]:
        return await self._executors.worker(self._started.pack, blobs)

    async def changes(self, clients: Sequence[str], parts: Sequence[str]) -> dict[str, Smaller]:
        return await self._executors.worker(self._started.changes, clients, cast(Sequence[PartKind], parts))

    async def arrive(self, client: str, part: str, blob: Blob, encoding: str, served: bool, max_norm: float) -> Arrived:
        return await self._executors.worker(
            self._started.arrive, client, cast(PartKind, part), blob, encoding, served, max_norm
        )

    async def aggregate(
        self,
        entries: Mapping[str, AcceptedUpdate],
        founders: Sequence[str] = (),
        adaptation: AdaptationSpec | None = None,
        unmasking: Unmasking | None = None,
    ) -> RoundOutcome:
        return await self._executors.worker(self._started.aggregate, entries, founders, adaptation, unmasking)

    async def go_back(self, to: int) -> RoundOutcome:
        return await self._executors.worker(self._started.go_back, to)

    async def another_start(self) -> RoundOutcome:
        return await self._executors.worker(self._started.another_start)

    async def settle(self, holders: Sequence[str] = ()) -> None:
        await self._executors.worker(self._started.settle, holders)

    async def forget(self, oldest: int) -> None:
        await self._executors.worker(self._started.forget, oldest)

    @property
    def _started(self) -> Engine:
        assert self._engine is not None  # noqa: S101 (`start` comes first)
        return self._engine
