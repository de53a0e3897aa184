"""Turns: one piece of work after another, each carried through to its end.

The caller may be a peer's call, which is cancelled when the peer vanishes. So the work is a separate task; the caller waits for
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
    """Clocks of a process, as values that tests can replace.

    Attributes:
        monotonic: Seconds, for spans; no person can set it.
        unix: The time of day, for people.
        stands: The monotonic clock does not move, so no deadline passes.
    """

    monotonic: Callable[[], float] = time.monotonic
    unix: Callable[[], float] = time.time
    stands: bool = False


T = TypeVar("T")


class Turns:
    """Queue of work, of which one piece has the turn."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._began_at: float | None = None

    def __repr__(self) -> str:
        return f"Turns({len(self._tasks)} under way)"

    @property
    def busy_s(self) -> float:
        """Seconds since the present turn began; 0 if there is none."""
        return 0.0 if self._began_at is None else time.monotonic() - self._began_at

    async def take(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work` in a turn, and return its result. Cancelling the caller does not cancel the work."""
        return await asyncio.shield(self.start(self._in_turn(work)))

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start work that needs no turn, and return its task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def carry(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work that needs no turn, and return its result. Cancelling the caller does not cancel the work."""
        return await asyncio.shield(self.start(work))

    async def stop(self) -> None:
        """Cancel the work under way, because the process ends. A restart continues it."""
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
