"""Where tensors are worked on: one thread for all devices of a process, and few devices at a time that hold any.

A device hands its orders to `carry_out` and does not know when, or together with whose, they are worked on. They are worked
on one after the other here; a place that trains several devices of one plan at once fits behind the same method.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from attune.fedclient.session import Order

if TYPE_CHECKING:
    from attune.fedclient.work.bench import Bench
    from attune.fedclient.work.state import Result, Tensors

T = TypeVar("T")


class Place:
    """`turns`: so many devices may hold tensors; `keep`: a device that waits for its next order keeps them in memory."""

    def __init__(self, turns: int = 1, keep: bool = True) -> None:
        self.keep = keep
        self.turn = asyncio.Semaphore(turns)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tensors")

    def __repr__(self) -> str:
        return f"<Place, keep={self.keep}, {self.turn}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def do(self, work: Callable[..., T], *arguments: Any) -> T:
        """`work(*arguments)` on the thread that tensors belong to; the event loop stays live."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *arguments))

    async def carry_out(
        self,
        bench: Bench,
        order: Order,
        fetched: dict[str, Tensors],
        bytes_down: int,
        progress: Callable[[float], None],
        cancelled: Callable[[], bool],
    ) -> Result:
        """The order's result, durable. The caller has its turn. Errors: those of Learner.carry_out."""
        return await self.do(bench.carry_out, order, fetched, bytes_down, progress, cancelled)
