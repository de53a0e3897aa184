"""One piece of work after the other, each carried through to its end, whoever asked for it.

A caller may be a peer's call, which is cancelled when the peer vanishes. So the work is a task of its own: the caller waits for
it and can go away.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar


@dataclass(frozen=True)
class Clock:
    """monotonic: seconds, for spans; nobody can set it. unix: the time of day, for what people are shown.

    stands: monotonic does not move, so nothing ever falls due.
    """

    monotonic: Callable[[], float] = time.monotonic
    unix: Callable[[], float] = time.time
    stands: bool = False


T = TypeVar("T")


class Turns:
    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._began_at: float | None = None

    def __repr__(self) -> str:
        return f"Turns({len(self._tasks)} under way)"

    @property
    def busy_s(self) -> float:
        """For how many seconds the present turn has lasted; 0: nobody has one."""
        return 0.0 if self._began_at is None else time.monotonic() - self._began_at

    async def take(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What `work` returns or raises, once it had its turn. Cancelling the caller does not cancel the work."""
        return await asyncio.shield(self.start(self._in_turn(work)))

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Work that needs no turn, and that nobody waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def carry(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns or raises. It needs no turn, and cancelling the caller does not cancel it."""
        return await asyncio.shield(self.start(work))

    async def stop(self) -> None:
        """Cancels what is under way, because the process ends: a restart takes it up again."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _in_turn(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with self._turn:
            self._began_at = time.monotonic()
            try:
                return await work()
            finally:
                self._began_at = None
