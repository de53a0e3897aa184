"""asyncio as Python 3.11 has it, also on 3.10: counted cancellations, and the timeouts and task groups that rest on them.

On 3.10 `taskgroup` brings them: the code of 3.12, ported back. Tasks count there in a loop that `run` or `Runner` has made. So
a deadline that ends in the moment in which somebody cancels the task swallows no cancellation, and is a TimeoutError.
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

__all__ = ["Runner", "TaskGroup", "cancelling", "run", "run_alone", "run_anywhere", "timeout"]

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """As asyncio.run, which on 3.10 does not count."""
    with Runner() as runner:
        return runner.run(main)


def cancelling() -> bool:
    """Whether somebody cancels the task that runs."""
    task = asyncio.current_task()
    assert isinstance(task, Task), "this loop does not count cancellations: run it by attune.common.aio"  # noqa: S101
    return task.cancelling() > 0


Stopped = Callable[[], bool]


def run_alone(make: Callable[[Stopped], Coroutine[Any, Any, T]]) -> T:
    """What the coroutine returns or raises. `make` gets what tells it that its caller was interrupted (Ctrl-C).

    An interruption ends it at its next step, in order, and is raised here afterwards, however many follow it.
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
        """Once: a second cancellation would hit what the first one lets end in order."""
        if stop.is_set():
            return
        stop.set()
        for loop, task in running:
            with contextlib.suppress(RuntimeError):  # the loop is closed: it has just ended by itself
                loop.call_soon_threadsafe(task.cancel)

    interruption: KeyboardInterrupt | None = None
    thread = threading.Thread(target=body, name="attune")
    thread.start()
    while not done.done():  # not until the thread ends: a `join` that is interrupted takes it for ended (CPython 3.11)
        try:
            if interruption is not None:
                give_up()
            wait([done])
        except KeyboardInterrupt as error:  # or a further one: what the thread works on is the caller's to take away
            interruption = error
    thread.join()
    if interruption is not None:
        raise interruption
    return done.result()


def run_anywhere(work: Coroutine[Any, Any, T]) -> T:
    """What the coroutine returns or raises: on this thread, or on one of its own where this one has a loop already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run(work)
    return run_alone(lambda stopped: work)
