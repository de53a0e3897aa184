"""Federations over narrow and slow links, in small."""

import asyncio
import contextlib
import os
import socket
import threading

import numpy as np
import pytest

from attune.common import aio
from benchmarks import buffered
from benchmarks.delay import Counted, Proxy, Way, through
from benchmarks.links import Case, measure

RTT_S = 0.2


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


async def _round_trip(payload: bytes, way: Way) -> tuple[bytes, float, float]:
    """Return the bytes that came back, and the delays of the first and the last byte."""
    echo = await asyncio.start_server(_echo, "127.0.0.1", 0)
    proxy = Proxy(echo.sockets[0].getsockname()[1], way)
    reader, writer = await asyncio.open_connection("127.0.0.1", await proxy.start())
    loop = asyncio.get_running_loop()
    started = loop.time()
    writer.write(payload)
    writer.write_eof()
    async with aio.timeout(60):
        first = await reader.read(1)
        first_s = loop.time() - started
        rest = await reader.read()
        last_s = loop.time() - started
    writer.close()
    for server in (proxy, echo):
        server.close()
    return first + rest, first_s, last_s


def test_bytes_arrive_whole_and_not_before_the_round_trip():
    payload = os.urandom(3_000_000)
    back, first_s, _ = aio.run(_round_trip(payload, Way(RTT_S)))
    assert back == payload
    assert first_s >= RTT_S


def test_a_narrow_link_lets_bytes_through_at_its_rate_in_both_directions():
    """Expect 0.4 s for 500 kB at 10 Mbit/s, with the way back at the same time."""
    payload = os.urandom(500_000)
    back, _, last_s = aio.run(_round_trip(payload, Way(0.0, 10.0)))
    assert back == payload
    assert last_s >= 0.4


def test_what_waits_for_a_narrow_link_is_bounded():
    """Check that a sender waits once modem and kernel are full."""

    async def scenario() -> int:
        async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        sink = await asyncio.start_server(deaf, "127.0.0.1", 0)
        proxy = Proxy(sink.sockets[0].getsockname()[1], Way(0.0, 0.1, 1 << 16))
        _, writer = await asyncio.open_connection("127.0.0.1", await proxy.start())
        writer.transport.set_write_buffer_limits(high=0)
        sent = 0
        with contextlib.suppress(TimeoutError):
            async with aio.timeout(1):
                while True:
                    writer.write(bytes(1 << 14))
                    await writer.drain()
                    sent += 1 << 14
        writer.close()
        proxy.close()
        sink.close()
        return sent

    assert aio.run(scenario()) < 8 << 20


def test_a_proxy_in_a_thread_ends_its_connections_with_it():
    """Check that both ends are closed and no thread is left; pytest would warn of a forgotten open connection."""
    before = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as listening, contextlib.ExitStack() as stays:
        with through(listening.getsockname()[1], Way()) as (port, proxy):
            near = stays.enter_context(socket.create_connection(("127.0.0.1", port), 10))
            far = stays.enter_context(listening.accept()[0])
            near.sendall(b"hello")
            assert far.recv(5) == b"hello"
            assert proxy.counted == Counted(1, 5, 0)
        assert (near.recv(1), far.recv(1)) == (b"", b"")
    assert set(threading.enumerate()) <= before


def test_bulk_on_a_narrow_link_breaks_no_connection_and_no_byte_is_sent_twice():
    """Run one device at 1 Mbit/s and 300 ms: each transfer of 300 kB takes 2.5 s. `make bench-links` runs the full matrix."""
    found = measure(Case(mbit_s=1.0, clients=1, parameters=75_000, rounds=1, patience_s=180.0))
    assert found["connections_each"] == 2, "one to enrol, one to live"
    assert found["times_the_blobs"] <= 1.05


# --- accuracy against time: the speeds of the devices, the curves over seeds, and when a curve reaches an accuracy


def test_speeds_are_a_pareto_law_cut_off_at_the_slowest():
    seconds = np.array(list(buffered.speeds([str(number) for number in range(20_000)], seed=0).values()))
    assert seconds.min() >= 1.0 and seconds.max() <= buffered.SLOWEST
    for at in (2.0, 5.0, 10.0):  # P(X > x) = (1/x - 1/20) / (1 - 1/20)
        assert (seconds > at).mean() == pytest.approx((1 / at - 1 / 20) / (1 - 1 / 20), abs=0.01)


def test_an_accuracy_is_reached_on_the_line_between_two_points():
    points = [(10.0, 0.4), (20.0, 0.6), (40.0, 0.7)]
    assert buffered.reaches(points, 0.5) == pytest.approx(15.0)
    assert buffered.reaches(points, 0.65) == pytest.approx(30.0)
    assert buffered.reaches(points, 0.4) == buffered.reaches(points, 0.1) == 10.0
    assert buffered.reaches(points, 0.71) is None
