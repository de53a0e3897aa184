"""Where blocking work runs, so that the event loop stays prompt: one thread owns the tensors, a few wait for the disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
IO_THREADS = 4


class Executors:
    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tensors")
        self._io = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="disk")

    async def worker(self, function: Callable[..., T], *arguments: object) -> T:
        """On the one tensor thread, after what was asked of it before."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, function, *arguments)

    async def disk(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._io, function, *arguments)

    def shutdown(self) -> None:
        """Ends after the job at hand; what still waits is dropped (it is redone after a restart)."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._io.shutdown(wait=True, cancel_futures=True)


class InlineExecutors(Executors):
    """Everything on the caller's thread: for a process in which nothing happens beside the federation."""

    def __init__(self) -> None:
        """No thread is started."""

    async def worker(self, function: Callable[..., T], *arguments: object) -> T:
        return function(*arguments)

    async def disk(self, function: Callable[..., T], *arguments: object) -> T:
        return function(*arguments)

    def shutdown(self) -> None:
        """There is nothing to end."""
