"""Deadlines and cancellations, which `taskgroup` counts on Python 3.10, and later versions count themselves."""

import asyncio
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from attune.common import aio


def test_a_deadline_is_the_builtin_timeout_error() -> None:
    async def late() -> None:
        async with aio.timeout(0.01):
            await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        aio.run(late())


@pytest.mark.parametrize("first", ["deadline", "cancellation"])
async def test_a_deadline_does_not_swallow_a_cancellation_of_the_same_moment(first: str) -> None:
    said: list[str] = []
    deadline = aio.timeout(None)

    async def work() -> None:
        try:
            async with deadline:
                await asyncio.sleep(60)
        except TimeoutError:
            said.append("went on")

    loop, task = asyncio.get_running_loop(), asyncio.create_task(work())
    await asyncio.sleep(0.01)
    if first == "cancellation":
        task.cancel()
    deadline.reschedule(loop.time())
    if first == "deadline":
        loop.call_soon(task.cancel)
    await asyncio.wait([task])
    assert task.cancelled(), said
    assert said == []


def test_an_inner_deadline_leaves_the_outer_one_alone() -> None:
    async def scenario() -> str:
        async with aio.timeout(60):
            try:
                async with aio.timeout(0.01):
                    await asyncio.sleep(60)
            except TimeoutError:
                await asyncio.sleep(0)
                assert not aio.cancelling()
                return "inner"
        raise AssertionError("unreachable")

    assert aio.run(scenario()) == "inner"


async def test_who_is_cancelled_knows_it_and_who_awaits_something_cancelled_does_not() -> None:
    found: list[tuple[str, bool]] = []

    async def awaits(name: str, what: asyncio.Future[Any]) -> None:
        try:
            await what
        except asyncio.CancelledError:
            found.append((name, aio.cancelling()))

    loop = asyncio.get_running_loop()
    given_up = loop.create_future()
    tasks = [asyncio.create_task(awaits(*each)) for each in (("awaits", given_up), ("cancelled", loop.create_future()))]
    assert not aio.cancelling()
    await asyncio.sleep(0)
    given_up.cancel()
    tasks[1].cancel()
    await asyncio.gather(*tasks)
    assert found == [("awaits", False), ("cancelled", True)]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let Ctrl-C interrupt, which a process of xdist ignores."""
    assert threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interruption_lets_the_coroutine_clean_up(interruptible: None) -> None:
    tidied = []

    async def scenario() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            tidied.append(True)

    with pytest.raises(KeyboardInterrupt):
        aio.run(scenario())
    assert tidied == [True]


def test_a_group_cancels_the_others_when_one_fails() -> None:
    ended = []

    async def scenario() -> None:
        async def waits() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(aio.cancelling())

        async def fails() -> None:
            raise ZeroDivisionError

        async with aio.TaskGroup() as group:
            group.create_task(waits())
            group.create_task(fails())

    with pytest.raises(Exception, match="TaskGroup") as failure:
        aio.run(scenario())
    assert [type(each) for each in failure.value.exceptions] == [ZeroDivisionError]  # type: ignore[attr-defined]
    assert ended == [True]
