"""A TCP proxy that delays: every byte arrives half a round-trip time later, in either direction, at unlimited bandwidth.

It stands for a long link without root's tools. What it leaves out: TCP's own slow start over that link, loss and jitter.
HTTP/2's windows and the protocol's round trips are the real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

import click

READ_BYTES = 1 << 18
IN_FLIGHT_CHUNKS = 1024  # at most 256 MiB on their way in one direction: more than any window lets out


async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Copies until the end of the stream; each chunk leaves `delay_s` after it came, however long the earlier ones take."""
    loop = asyncio.get_running_loop()
    underway: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(IN_FLIGHT_CHUNKS)

    async def take() -> None:
        while True:
            data = await reader.read(READ_BYTES)
            await underway.put((loop.time() + delay_s, data))
            if not data:
                return

    async def give() -> None:
        while True:
            due, data = await underway.get()
            await asyncio.sleep(due - loop.time())
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()

    with contextlib.suppress(OSError):
        async with asyncio.TaskGroup() as group:
            group.create_task(take())
            group.create_task(give())


async def forward(port: int, delay_s: float, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection to `port` on this machine, from its opening to the end of both directions."""
    there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port, limit=READ_BYTES)
    try:
        await asyncio.gather(pipe(reader, there_writer, delay_s), pipe(there_reader, writer, delay_s), return_exceptions=True)
    finally:
        for each in (writer, there_writer):
            each.close()


async def serve(port: int, rtt_s: float) -> asyncio.Server:
    """A listening proxy to `port`, on a free port of this machine."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await forward(port, rtt_s / 2, reader, writer)

    return await asyncio.start_server(accept, "127.0.0.1", 0, limit=READ_BYTES)


@click.command()
@click.option("--to", "port", type=int, required=True, help="Port on this machine.")
@click.option("--rtt-ms", type=float, required=True, help="Round-trip time to add.")
def main(port: int, rtt_ms: float) -> None:
    """Prints the port it listens on, and forwards until it is stopped."""

    async def run() -> None:
        server = await serve(port, rtt_ms / 1000)
        click.echo(server.sockets[0].getsockname()[1])
        sys.stdout.flush()
        await server.serve_forever()

    asyncio.run(run())


if __name__ == "__main__":
    main()
