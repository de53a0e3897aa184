"""Where a device works on tensors: one thread for all devices of a process, and few devices at a time that hold any.

torch is imported on that thread, by the first learner that is made: the event loop stays live meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from attune.common.plan import Plan
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.home import Home
from attune.fedclient.options import Options

if TYPE_CHECKING:
    from attune.fedclient.messages import Result
    from attune.fedclient.work.learner import Learner

T = TypeVar("T")


class Worker:
    """turns: the number of devices that may hold tensors at one time. keep: a waiting device keeps its tensors in memory."""

    def __init__(self, turns: int = 1, keep: bool = True) -> None:
        self.keep = keep
        self.turn = asyncio.Semaphore(turns)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tensors")

    def __repr__(self) -> str:
        return f"<Worker, keep={self.keep}, {self.turn}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def do(self, work: Callable[..., T], *arguments: Any) -> T:
        """`work(*arguments)` on the thread that tensors belong to; the event loop stays live."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *arguments))


class LearnerSlot:
    """One device's learner, which exists while an order is worked on; between orders only if `keep`.

    A learner is made from shard, plan and the newest order on disk, as after a restart. So putting it away changes no bit.
    `rest` may be called from any thread; everything else belongs to the worker's.
    Errors of the constructor: those of make_learner.
    """

    def __init__(self, plan: Plan, shard: LazyShard, name: str, home: Home, options: Options, keep: bool) -> None:
        self._arguments = plan, shard, name, home, options
        self._home, self._keep = home, keep
        self._learner: Learner | None = None
        self._newest: Result | None = None
        self.orders = self.awake().orders
        self.rest()

    def __repr__(self) -> str:
        return f"<LearnerSlot in {self._home.path}, {'at rest' if self._learner is None else 'in use'}>"

    @property
    def newest(self) -> Result | None:
        """The result of the newest finished order."""
        return self._learner.newest if self._learner is not None else self._newest

    def awake(self) -> Learner:
        """The learner, made if it is not there. Errors: those of make_learner."""
        if self._learner is None:
            from attune.fedclient.work.learner import make_learner

            self._learner = make_learner(*self._arguments)
        return self._learner

    def rest(self) -> None:
        """Drops all tensors, unless `keep` is set."""
        if self._learner is not None and not self._keep:
            self._newest = self._learner.newest
            self._learner = None
