"""Workers: how the devices of a process share its threads and memory while orders are carried out.

torch is imported on the worker's thread, by the first learner that is made: the event loop stays responsive meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import Self

from attune.common.plan import LIGHT, Plan
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.options import DeviceOptions
from attune.fedclient.work.executor import AnyLearner, Executor, SequentialExecutor, Work, done, result_of

if TYPE_CHECKING:
    from attune.fedclient.messages import OrderResult
    from attune.fedclient.work.orders import OrderStore

T = TypeVar("T")
QUIET_S = 0.05  # pause without a new order that ends a batch: a round's orders come within some milliseconds


class Worker:
    """One thread for all tensors of a process, on which orders are carried out one after the other.

    Args:
        turns: How many devices may hold what they fetched at one time.
        awake_bytes: Bytes that learners of devices that wait may hold in memory.
    """

    executor: Executor = SequentialExecutor()

    def __init__(self, turns: int = 1, awake_bytes: float = math.inf) -> None:
        self.learners, self.make_learner = LearnerCache(awake_bytes), local_learner
        self.turn: contextlib.AbstractAsyncContextManager[None] = asyncio.Semaphore(turns)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tensors")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def finish(self) -> None:
        """Wait for the job at hand, which has been told to stop."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def do(self, work: Callable[..., T], *arguments: Any) -> T:
        """Call `work(*arguments)` on the thread of the tensors; the event loop stays responsive."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *arguments))

    async def carry_out(self, work: Work) -> OrderResult:
        """Return the result. Raises what the learner's carry_out raises."""
        [future] = await self.do(self.executor.run, [work])
        return await result_of(future)

    def answered(self) -> None:
        """No-op: only a worker that collects a cohort's orders waits for devices that have answered already."""


class BatchingWorker(Worker):
    """Orders that come within QUIET_S of each other go to `executor` together; those that come meanwhile are the next batch.

    A batch has at most as many devices as have a turn. Over a network, chance decides which devices share a batch, so an
    executor must give each device the same result, up to rounding, in any batch.
    """

    def __init__(self, turns: int, awake_bytes: float, executor: Executor) -> None:
        super().__init__(turns, awake_bytes)
        self.executor = executor
        self._waiting: list[tuple[Work, asyncio.Future[Future[OrderResult]]]] = []
        self._task: asyncio.Task[None] | None = None

    async def carry_out(self, work: Work) -> OrderResult:
        begun: asyncio.Future[Future[OrderResult]] = asyncio.get_running_loop().create_future()
        self._waiting.append((work, begun))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run_all())
        return await result_of(await begun)

    async def _run_all(self) -> None:
        while self._waiting:
            await self._quiet()
            batch, self._waiting = self._waiting, []
            batch = [(work, begun) for work, begun in batch if not begun.done()]  # without devices that were stopped
            if batch:
                deliver(batch, await self.do(self._run, [work for work, _ in batch]))

    async def _quiet(self) -> None:
        seen = 0
        while len(self._waiting) > seen:
            seen = len(self._waiting)
            await asyncio.sleep(QUIET_S)

    def _run(self, works: list[Work]) -> Sequence[Future[OrderResult]]:
        """Run a batch. If the executor itself fails, every work of the batch has failed."""
        try:
            return self.executor.run(works)
        except Exception as error:
            return [done(error) for _ in works]


def deliver(
    waiting: Sequence[tuple[Work, asyncio.Future[Future[OrderResult]]]], futures: Sequence[Future[OrderResult]]
) -> None:
    """Hand each work's future to the device that waits for it, unless the device was stopped meanwhile."""
    for (_, begun), future in zip(waiting, futures, strict=True):
        if not begun.done():
            begun.set_result(future)


def local_learner(
    plan: Plan, shard: LazyShard, name: str, orders: Callable[[str], OrderStore], options: DeviceOptions
) -> AnyLearner:
    """Make a learner of this process. Raises what make_learner raises."""
    if options.variant == LIGHT:
        from attune.fedclient.work import light

        return light.make_learner(plan, shard, name, orders, options)
    from attune.fedclient.work.learner import make_learner

    return make_learner(plan, shard, name, orders, options)


@dataclass
class OrderInProgress:
    """The order being worked on, or the result being handed in."""

    task: asyncio.Task[None]
    stop: threading.Event = field(default_factory=threading.Event)
    deadline: asyncio.TimerHandle | None = None  # on the loop's clock, which is monotonic
    begun: float = field(default_factory=time.monotonic)


class LearnerSlot:
    """One device's learner, which exists while an order is worked on; between orders as long as the cache has room for it.

    A learner is made from shard, plan and the newest order that is kept, as after a restart. So dropping it changes no bit.
    `take` and `release` may be called from any thread; everything else belongs to the worker's.

    Args:
        name: The device's name.
        cache: Decides how long a learner is kept.
        make: Makes the learner. The constructor raises what it raises.
    """

    def __init__(self, name: str, cache: LearnerCache, make: Callable[[], AnyLearner]) -> None:
        self._name, self._cache, self._make = name, cache, make
        self._learner: AnyLearner | None = None
        self._newest: OrderResult | None = None
        self.orders = self.learner().orders
        self.release()

    @property
    def newest(self) -> OrderResult | None:
        """Result of the newest finished order."""
        return self._learner.newest if self._learner is not None else self._newest

    def take(self) -> AnyLearner | None:
        """Return the learner if it is there; it will not be dropped before `release`."""
        self._cache.pin(self)
        return self._learner

    def learner(self) -> AnyLearner:
        """Return the learner, made if it is not there; as `take`. Raises what make_learner raises."""
        learner = self.take()
        if learner is None:
            learner = self._learner = self._make()
        return learner

    def release(self) -> None:
        """Allow the learner's tensors to be dropped while the device waits."""
        if self._learner is not None:
            self._cache.release(self, self._learner.size_bytes)

    def drop(self) -> None:
        """Drop the learner with all its tensors."""
        if self._learner is not None:
            self._newest = self._learner.newest
            self._learner.let_go()
            self._learner = None


class LearnerCache:
    """The learners of devices that wait: those that worked last, `limit_bytes` at most. Several threads may use it."""

    def __init__(self, limit_bytes: float) -> None:
        self._limit_bytes = limit_bytes
        self._sizes: dict[LearnerSlot, int] = {}  # the one that worked last at the end
        self._bytes = 0
        self._lock = Lock()

    def pin(self, slot: LearnerSlot) -> None:
        """Keep this learner: its device works."""
        with self._lock:
            self._bytes -= self._sizes.pop(slot, 0)

    def release(self, slot: LearnerSlot, size_bytes: int) -> None:
        """Take in a learner of this size, and drop those that have waited longest where there are too many."""
        with self._lock:
            self._bytes += size_bytes - self._sizes.pop(slot, 0)
            self._sizes[slot] = size_bytes
            while self._bytes > self._limit_bytes:
                oldest = next(iter(self._sizes))
                self._bytes -= self._sizes.pop(oldest)
                oldest.drop()
