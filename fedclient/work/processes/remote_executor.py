"""The executor whose learners live in other processes: each device is placed once, on the host with the fewest samples."""

from __future__ import annotations

import asyncio
import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, ClassVar, cast

from typing_extensions import Self

from attune import seams
from attune.common.plan import Plan
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.options import DeviceOptions
from attune.fedclient.work.executor import HostDied, HostLost, Work, result_of
from attune.fedclient.work.worker import LearnerCache, Worker

if TYPE_CHECKING:
    from attune.fedclient.messages import OrderResult
    from attune.fedclient.work.objectives.base import OnProgress
    from attune.fedclient.work.orders import OrderStore
    from attune.fedclient.work.processes.remote_learner import RemoteLearner
    from attune.fedclient.work.processes.requests import HostAnswer, HostRequest

TURNS_EACH = 2  # devices that have a turn, for each process: one trains while the next one downloads


class LearnerHost(ABC):
    """A process that holds learners. It is started again when it has died. Several threads may call it.

    Attributes:
        life: How often the process was started. With each life all that it held is gone.
    """

    called: ClassVar[str]  # what errors call it
    failures: ClassVar[tuple[type[Exception], ...]]  # raised by `_exchange` where the process has died

    def __init__(self) -> None:
        self.life, self._dropped, self._lock, self._closed = 0, set[str](), Lock(), False
        self._start()

    def ask(self, life: int, request: HostRequest, progress: OnProgress, cancelled: Callable[[], bool]) -> HostAnswer:
        """Return the answer.

        Raises:
            HostLost: This life is over.
            HostDied: It ended before the answer, and the next life has begun.
        """
        with self._lock:
            if life != self.life:
                raise HostLost(f"the {self.called} that held this device has died")
            dropped, self._dropped = self._dropped, set()
            dropped.discard(request.name)
            try:
                return self._exchange((dropped, request), progress, cancelled)
            except self.failures as error:
                raise HostDied(f"the {self.called} that held this device has died ({self._restart(error)})") from None

    def drop(self, name: str) -> None:
        """Drop the learner of this device with the next request."""
        self._dropped.add(name)

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _start(self) -> None:
        """Start a life."""

    @abstractmethod
    def _exchange(
        self, message: tuple[set[str], HostRequest], progress: OnProgress, cancelled: Callable[[], bool]
    ) -> HostAnswer:
        """Send a request, with the names of the learners to drop before it, and wait for the answer."""

    @abstractmethod
    def _restart(self, error: Exception) -> str:
        """Start the next life, unless the process was closed; return how the last one ended."""


@dataclass
class Placement:
    """The host of one device.

    Attributes:
        host: The host.
        thread: Waits for the host.
        life: The host's life in which the device was placed.
        deaths: How often in a row the host has died during this device's work.
    """

    host: LearnerHost
    thread: ThreadPoolExecutor
    life: int = 0
    deaths: int = 0


class RemoteExecutor:
    """Implements Executor: hosts, each with a thread that waits for it, and the devices that are placed on them."""

    def __init__(self, name: str, start: Callable[[], LearnerHost], size: int) -> None:
        self.name = name
        self.hosts: Sequence[LearnerHost] = [start() for _ in range(size)]
        self.threads = [ThreadPoolExecutor(1, thread_name_prefix=f"{name}-{number}") for number in range(size)]
        self._samples = [0] * size
        self._placements: dict[str, Placement] = {}
        self._lock = Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for host in self.hosts:
            host.close()
        for thread in self.threads:
            thread.shutdown(wait=True, cancel_futures=True)

    def run(self, works: Sequence[Work]) -> Sequence[Future[OrderResult]]:
        """Carry out works, as Executor.run. Each host does its works one after the other."""
        return [cast("RemoteLearner", work.learner).thread.submit(work.run) for work in works]

    def make_learner(
        self, plan: Plan, shard: LazyShard, name: str, orders: Callable[[str], OrderStore], options: DeviceOptions
    ) -> RemoteLearner:
        """Make a learner on a host, as fedclient.work.learner.make_learner."""
        from attune.fedclient.work.processes.remote_learner import RemoteLearner
        from attune.fedclient.work.processes.requests import PlaceDevice

        return RemoteLearner(self._place(name, shard.profile.samples), PlaceDevice(name, plan, shard, orders(name), options))

    def _place(self, name: str, samples: int) -> Placement:
        with self._lock:
            if name not in self._placements:
                at = min(range(len(self.hosts)), key=self._samples.__getitem__)
                self._samples[at] += samples
                self._placements[name] = Placement(self.hosts[at], self.threads[at])
            return self._placements[name]


class RemoteWorker(Worker):
    """A worker whose devices' learners live on the executor's hosts.

    Args:
        executor: Its hosts hold the learners.
        awake_bytes: Bytes that learners of devices that wait may hold in memory, in all processes.
        stopped: Whether to give up all work.
        bounded: Whether devices take turns, so that what they download does not wait in memory.
    """

    def __init__(
        self, executor: RemoteExecutor, awake_bytes: float, stopped: Callable[[], bool] = lambda: False, bounded: bool = True
    ) -> None:
        turns = TURNS_EACH * len(executor.hosts)
        self.executor, self._stopped = executor, stopped
        self.learners, self.make_learner = LearnerCache(awake_bytes), executor.make_learner
        self.turn = asyncio.Semaphore(turns) if bounded else contextlib.nullcontext()
        self._thread = ThreadPoolExecutor(turns, thread_name_prefix="waiting")

    async def carry_out(self, work: Work) -> OrderResult:
        """Carry out an order, as Worker.carry_out.

        Raises:
            HostLost: The host is gone.
        """
        [future] = self.executor.run([work.cancelled_by(self._stopped)])
        return await result_of(future)


def cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processes(size: int | None = None) -> RemoteExecutor:
    """Return an executor of so many processes of this machine, by default one for each processor. Raises SettingError."""
    from attune.fedclient.work.processes.process_host import process_host

    return RemoteExecutor("processes", process_host, size or cores())


# By the name of the executor; called with the number of processes or workers.
REMOTE_EXECUTORS: Mapping[str, Callable[..., RemoteExecutor]] = {"processes": processes, "ray": seams.ray_workers}
