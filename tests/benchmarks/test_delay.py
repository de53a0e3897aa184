"""The delay proxy: bytes come through whole and in order, and late, without the earlier holding up the later."""

from __future__ import annotations

import asyncio
import os

from benchmarks.delay import serve

RTT_S = 0.2


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


async def _round_trip(payload: bytes) -> tuple[bytes, float, float]:
    """What came back, and after how long its first byte and its last."""
    echo = await asyncio.start_server(_echo, "127.0.0.1", 0)
    proxy = await serve(echo.sockets[0].getsockname()[1], RTT_S)
    reader, writer = await asyncio.open_connection(*proxy.sockets[0].getsockname())
    loop = asyncio.get_running_loop()
    started = loop.time()
    writer.write(payload)
    writer.write_eof()
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
    back, first_s, _ = asyncio.run(asyncio.wait_for(_round_trip(payload), 60))
    assert back == payload
    assert first_s >= RTT_S


def test_chunks_travel_side_by_side():
    """3 MB are more than ten chunks: were each to wait for the one before it, the last would need ten times the delay."""
    _, first_s, last_s = asyncio.run(asyncio.wait_for(_round_trip(bytes(3_000_000)), 60))
    assert last_s - first_s < 5 * RTT_S
