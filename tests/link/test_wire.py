"""Cancellation on a wire: whose it is, when a call breaks and its task is cancelled in the same turn of the loop."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from attune.fedclient.link.port import Broken
from attune.fedclient.link.transfer import persist, together
from attune.fedclient.link.wire import Wire

CUT = AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), "cut")


class Call:
    """As a call of grpc.aio: it ends with an error, or as cancelled where it was cancelled."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def cancel(self) -> None:
        self.answer.cancel()


class Always:
    open = asyncio.Event()


class Channel:
    async def close(self) -> None:
        pass


def struck(strike, nested):
    """How often a transfer was tried, and whether its job ended as cancelled, after `strike(call, job, wire)`."""

    async def scenario():
        wire, calls, link = Wire(Channel()), [], Always()
        link.open = asyncio.Event()
        link.open.set()

        async def attempt():
            calls.append(Call())
            with wire.call(calls[-1]) as call:
                async with asyncio.timeout(30):
                    await call.answer

        job = asyncio.create_task(together([persist(link, attempt, print)]) if nested else persist(link, attempt, print))
        for _ in range(5):  # so that the first call has begun
            await asyncio.sleep(0)
        await strike(calls[0], job, wire)
        await asyncio.wait([job], timeout=1.0)
        ended = job.cancelled()
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
        return len(calls), ended

    return asyncio.run(scenario())


@pytest.mark.parametrize("nested", [False, True], ids=["alone", "together with others"])
@pytest.mark.parametrize("first", ["break", "cancel"])
def test_a_job_whose_call_breaks_as_it_is_cancelled_is_cancelled(first, nested):
    async def strike(call, job, wire):
        steps = [lambda: call.answer.set_exception(CUT), job.cancel]
        for step in steps if first == "break" else reversed(steps):
            if not call.answer.done() or step is not steps[0]:
                step()

    assert struck(strike, nested) == (1, True)


@pytest.mark.parametrize("nested", [False, True], ids=["alone", "together with others"])
def test_a_job_whose_connection_is_replaced_goes_on(nested):
    async def strike(call, job, wire):
        await wire.cut("moved over")

    assert struck(strike, nested) == (2, False)


def test_what_was_cut_says_why():
    async def scenario():
        wire = Wire(Channel())

        async def wait():
            with wire.call(Call()) as call:
                await call.answer

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        await wire.cut("moved over")
        with pytest.raises(Broken, match="moved over"):
            await task

    asyncio.run(scenario())
