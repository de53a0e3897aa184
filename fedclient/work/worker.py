"""Where a device works on tensors: one thread for all devices of a process, and few devices at a time that hold any.

torch is imported on that thread, by the first learner that is made: the event loop stays live meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from typing_extensions import Self

from attune.common.plan import Plan
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.options import DeviceOptions

if TYPE_CHECKING:
    from attune.common.exchange.messages import BlobRef, Order
    from attune.common.metrics import Choice
    from attune.common.wire.header import Manifest
    from attune.fedclient.data.prepare import Standardiser
    from attune.fedclient.messages import Result
    from attune.fedclient.work.orders import OrderStore
    from attune.fedclient.work.trainer import Progress, Tensors

T = TypeVar("T")


class Lost(Exception):
    """The process that held a learner is gone, and nothing that it had committed."""


class Died(Lost):
    """It ended while it was asked."""


class AnyLearner(Protocol):
    """What a device needs of its learner, wherever that is. fedclient.work.learner says what each of these is."""

    plan: Plan
    name: str
    orders: OrderStore

    @property
    def newest(self) -> Result | None: ...

    @property
    def standardiser(self) -> Standardiser | None: ...

    @property
    def size_bytes(self) -> int: ...

    def missing(self, order: Order) -> list[tuple[BlobRef, Manifest]]: ...

    def carry_out(
        self, order: Order, fetched: Mapping[str, Tensors], bytes_down: int, progress: Progress, cancelled: Callable[[], bool]
    ) -> Result:
        """Errors: Lost too."""

    def finished(self) -> dict[Choice, Tensors]: ...

    def let_go(self) -> None: ...


Make = Callable[[Plan, LazyShard, str, Callable[[str], "OrderStore"], DeviceOptions], AnyLearner]


@dataclass(frozen=True)
class Work:
    """An order for which all is there. The fields are those of Learner.carry_out."""

    learner: AnyLearner
    order: Order
    fetched: Mapping[str, Tensors]
    bytes_down: int
    progress: Progress
    cancelled: Callable[[], bool]

    def run(self) -> Result:
        """Errors: those of the learner's carry_out."""
        return self.learner.carry_out(self.order, self.fetched, self.bytes_down, self.progress, self.cancelled)


class Worker:
    """turns: how many devices may work at one time. awake_bytes: what those that wait may hold in memory meanwhile."""

    def __init__(self, turns: int = 1, awake_bytes: float = math.inf) -> None:
        self.awake, self.make = Awake(awake_bytes), made_here
        self.turn: contextlib.AbstractAsyncContextManager[None] = asyncio.Semaphore(turns)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tensors")

    def __repr__(self) -> str:
        return f"<Worker, {self.awake}, {self.turn}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def do(self, work: Callable[..., T], *arguments: Any) -> T:
        """`work(*arguments)` on the thread that tensors belong to; the event loop stays live."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *arguments))

    async def carry_out(self, work: Work) -> Result:
        """What it comes to. Errors: those of the learner's carry_out."""
        return await self.do(work.run)

    def look(self) -> None:
        """Somebody has answered. Here nobody waits for that."""


def made_here(
    plan: Plan, shard: LazyShard, name: str, orders: Callable[[str], OrderStore], options: DeviceOptions
) -> AnyLearner:
    """A learner of this process. Errors: those of make_learner."""
    from attune.fedclient.work.learner import make_learner

    return make_learner(plan, shard, name, orders, options)


class LearnerSlot:
    """One device's learner, which exists while an order is worked on; between orders as long as `awake` has room for it.

    A learner is made from shard, plan and the newest order that is kept, as after a restart. So putting it away changes no bit.
    `take` and `rest` may be called from any thread; everything else belongs to the worker's.
    make: what makes one. Errors of the constructor: those of make_learner.
    """

    def __init__(
        self,
        plan: Plan,
        shard: LazyShard,
        name: str,
        orders: Callable[[str], OrderStore],
        options: DeviceOptions,
        awake: Awake,
        make: Make,
    ) -> None:
        self._arguments = plan, shard, name, orders, options
        self._name, self._awake, self._make = name, awake, make
        self._learner: AnyLearner | None = None
        self._newest: Result | None = None
        self.orders = self.awake().orders
        self.rest()

    def __repr__(self) -> str:
        return f"<LearnerSlot of {self._name}, {'at rest' if self._learner is None else 'in use'}>"

    @property
    def newest(self) -> Result | None:
        """The result of the newest finished order."""
        return self._learner.newest if self._learner is not None else self._newest

    def take(self) -> AnyLearner | None:
        """The learner if it is there; it will not be put away before `rest`."""
        self._awake.works(self)
        return self._learner

    def awake(self) -> AnyLearner:
        """The learner, made if it is not there. Errors: those of make_learner."""
        found = self.take()
        if found is None:
            found = self._learner = self._make(*self._arguments)
        return found

    def rest(self) -> None:
        """The device waits: its tensors may go."""
        if self._learner is not None:
            self._awake.rests(self, self._learner.size_bytes)

    def sleep(self) -> None:
        """Drops all tensors."""
        if self._learner is not None:
            self._newest = self._learner.newest
            self._learner.let_go()
            self._learner = None


class Awake:
    """Learners that wait and are still in memory: those that worked last, `limit_bytes` at most. Several threads may use it."""

    def __init__(self, limit_bytes: float) -> None:
        self._limit_bytes = limit_bytes
        self._sizes: dict[LearnerSlot, int] = {}  # the one that worked last at the end
        self._bytes = 0
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"<Awake, {len(self._sizes)} learners of {self._bytes} bytes>"

    def works(self, slot: LearnerSlot) -> None:
        """Its tensors are not to go now."""
        with self._lock:
            self._bytes -= self._sizes.pop(slot, 0)

    def rests(self, slot: LearnerSlot, size_bytes: int) -> None:
        """It waits, and holds so much. Who has waited longest is put to sleep where that is too much."""
        with self._lock:
            self._bytes += size_bytes - self._sizes.pop(slot, 0)
            self._sizes[slot] = size_bytes
            while self._bytes > self._limit_bytes:
                oldest = next(iter(self._sizes))
                self._bytes -= self._sizes.pop(oldest)
                oldest.sleep()
