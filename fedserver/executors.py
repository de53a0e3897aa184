"""Threads for blocking work, so that the event loop stays prompt: one owns the tensors, a few wait for the disk."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
U = TypeVar("U")
IO_THREADS = 4


class Executors:
    """The threads of one server."""

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tensors")
        self._io = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="disk")

    async def worker(self, function: Callable[..., T], *arguments: object) -> T:
        """Call the function on the one tensor thread, after what was asked of it before."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, function, *arguments)

    async def disk(self, function: Callable[..., T], *arguments: object) -> T:
        """Call the function on one of the threads that wait for the disk."""
        return await asyncio.get_running_loop().run_in_executor(self._io, function, *arguments)

    async def both(self, first: Callable[[], Awaitable[T]], second: Callable[[], Awaitable[U]]) -> tuple[T, U]:
        """Do both at the same time."""
        return await asyncio.gather(first(), second())

    def shutdown(self) -> None:
        """End after the job at hand. Jobs that wait are dropped; a restart does them again."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._io.shutdown(wait=True, cancel_futures=True)


class InlineExecutors(Executors):
    """Executors on the caller's thread, for a process in which the federation does one thing at a time."""

    def __init__(self) -> None:
        """Start no thread."""

    async def worker(self, function: Callable[..., T], *arguments: object) -> T:
        return function(*arguments)

    async def disk(self, function: Callable[..., T], *arguments: object) -> T:
        return function(*arguments)

    async def both(self, first: Callable[[], Awaitable[T]], second: Callable[[], Awaitable[U]]) -> tuple[T, U]:
        return await first(), await second()

    def shutdown(self) -> None:
        """No-op: there is no thread."""
