"""The asyncio of Python 3.11, also on 3.10: counted cancellations, timeouts and task groups; and loops on their own thread.

On Python 3.10 the package `taskgroup` provides them, ported back from 3.12. There, tasks count cancellations in a loop that
`run` or `Runner` has made. So a timeout that ends just when the task is cancelled swallows no cancellation, and is a
TimeoutError.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

if sys.version_info >= (3, 11):
    from asyncio import Runner, Task, TaskGroup, timeout  # novm
else:
    from taskgroup import Runner, TaskGroup, timeout
    from taskgroup.tasks import Task

__all__ = ["Runner", "StopSwitch", "TaskGroup", "cancelling", "run", "run_blocking", "run_in_thread", "timeout"]

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as asyncio.run does; on Python 3.10 its tasks count cancellations too."""
    with Runner() as runner:
        return runner.run(main)


def cancelling() -> bool:
    """Return whether the current task is being cancelled."""
    task = asyncio.current_task()
    assert isinstance(task, Task), "this loop does not count cancellations: run it by attune.common.aio"  # noqa: S101
    return task.cancelling() > 0


Stopped = Callable[[], bool]


def run_in_thread(make: Callable[[Stopped], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine in a loop on a thread of its own, and return what it returns. For notebooks, whose thread has a loop.

    An interruption (Ctrl-C) cancels the coroutine once, and is raised here after the coroutine has ended, however many
    interruptions follow. `make` gets a function that says whether the caller was interrupted.
    """
    stop, done = threading.Event(), Future[T]()
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 (a coroutine that runs has one)
        running.append((asyncio.get_running_loop(), task))
        return await make(stop.is_set)

    def body() -> None:
        try:
            done.set_result(run(main()))
        except BaseException as error:
            done.set_exception(error)

    def give_up() -> None:
        """Cancel only once: a second cancellation would hit the clean-up after the first one."""
        if stop.is_set():
            return
        stop.set()
        for loop, task in running:
            with contextlib.suppress(RuntimeError):  # the loop is closed: it has just ended by itself
                loop.call_soon_threadsafe(task.cancel)

    interruption: KeyboardInterrupt | None = None
    thread = threading.Thread(target=body, name="attune")
    thread.start()
    while not done.done():  # not thread.join: an interrupted join takes the thread for ended (CPython 3.11)
        try:
            if interruption is not None:
                give_up()
            wait([done])
        except KeyboardInterrupt as error:
            interruption = error
    thread.join()
    if interruption is not None:
        raise interruption
    return done.result()


class StopSwitch:
    """Switch by which another thread ends a coroutine. Without one under way, it ends the next one."""

    def __init__(self) -> None:
        self._lock, self._on = threading.Lock(), False
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None

    def stop(self) -> None:
        """End the coroutine. This returns at once, and may be repeated: a second cancellation would hit its clean-up."""
        with self._lock:
            if self._running is not None and not self._on:
                loop, task = self._running
                loop.call_soon_threadsafe(task.cancel)
            self._on = True

    async def over(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what a coroutine returns, unless it is stopped; then it is cancelled."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 (a coroutine that runs has one)
        with self._lock:
            self._running = asyncio.get_running_loop(), task
            if self._on:
                task.cancel()
        try:
            return await work
        finally:
            with self._lock:
                self._running, self._on = None, False


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on this thread, or on a thread of its own if this one runs a loop already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run(work)
    return run_in_thread(lambda stopped: work)
