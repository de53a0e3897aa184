"""Cancellation on a wire, when a call breaks and its task is cancelled in the same turn of the loop."""

import asyncio
import contextlib
import socket

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from attune.common import aio
from attune.common.exchange.messages import Hello
from attune.fedclient.link.enrol import GrpcChannel
from attune.fedclient.link.port import Broken
from attune.fedclient.link.transfer import persist, together
from tests.fedclient.link.server import OverGrpc, Scripted

CUT = AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), "cut")


class Call:
    """Call like one of grpc.aio: it ends with an error, or as cancelled if it was cancelled."""

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
    """Count the tries of a transfer after `strike(call, job, wire)`, and return whether its job ended as cancelled."""

    async def scenario():
        wire, calls, link = GrpcChannel(Channel()), [], Always()
        link.open = asyncio.Event()
        link.open.set()

        async def attempt():
            calls.append(Call())
            with wire.call(calls[-1]) as call:
                async with aio.timeout(30):
                    await call.answer

        job = asyncio.create_task(together([persist(link, attempt, print)]) if nested else persist(link, attempt, print))
        for _ in range(5):  # until the first call has begun
            await asyncio.sleep(0)
        await strike(calls[0], job, wire)
        await asyncio.wait([job], timeout=1.0)
        ended = job.cancelled()
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
        return len(calls), ended

    return aio.run(scenario())


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


async def test_what_was_cut_says_why():
    wire = GrpcChannel(Channel())

    async def wait():
        with wire.call(Call()) as call:
            await call.answer

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    await wire.cut("moved over")
    with pytest.raises(Broken, match="moved over"):
        await task


def test_a_server_that_has_just_come_up_is_met_at_the_next_try(tmp_path):
    """Allow for gRPC, which remembers a failed connection for a second, and answers every call of that time with it."""

    async def scenario():
        server, tries = OverGrpc(Scripted(), tmp_path), 0
        with socket.create_server(("127.0.0.1", 0)) as placeholder:
            port = placeholder.getsockname()[1]
        link, opened = server.link(port), asyncio.Event()

        async def handle(event):
            opened.set()

        async def connect():
            nonlocal tries
            while True:
                tries += 1
                with contextlib.suppress(Broken):
                    await link.control(Hello("test", b"{}"), handle)
                if not opened.is_set():
                    await link.diagnosis()
                if tries == 1:
                    await server.start(port)

        connecting = asyncio.create_task(connect())
        async with aio.timeout(30):
            await opened.wait()
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        await link.close()
        await server.stop()
        return tries

    assert aio.run(scenario()) == 2
