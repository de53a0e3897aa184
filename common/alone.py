"""An event loop on a thread of its own: for callers whose thread has a loop already, such as a notebook's."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from attune.common import aio

T = TypeVar("T")
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
            done.set_result(aio.run(main()))
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
        return aio.run(work)
    return run_alone(lambda stopped: work)
