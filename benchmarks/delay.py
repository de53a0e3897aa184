"""A TCP proxy that simulates a long or narrow link: bytes arrive half a round-trip time later, at a limited rate.

Each connection has a link of its own, with the same rate in both directions. A bounded buffer lies before it, as in a modem:
when it is full, the proxy stops reading. It needs no root rights. TCP's own slow start over that link, loss and jitter are not
simulated. HTTP/2's windows and the protocol's round trips are the real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import click

from attune.common import aio

READ_BYTES = 1 << 18
CHUNK_BYTES = 1 << 12  # chunk of a limited link; at 1 Mbit/s it takes 33 ms
IN_FLIGHT_CHUNKS = 1 << 16
MODEM_BYTES = 1 << 17


@dataclass(frozen=True)
class Way:
    """Properties of a link.

    Attributes:
        rtt_s: Seconds that are added to every round trip.
        mbit_s: Rate in each direction; 0 for no limit.
        modem_bytes: Bytes that may wait for the link.
    """

    rtt_s: float = 0.0
    mbit_s: float = 0.0
    modem_bytes: int = MODEM_BYTES

    @property
    def bytes_s(self) -> float:
        return self.mbit_s * 1e6 / 8 if self.mbit_s else float("inf")

    @property
    def chunk_bytes(self) -> int:
        return CHUNK_BYTES if self.mbit_s else READ_BYTES


@dataclass
class Counted:
    """Bytes and connections that went through a proxy so far. `up` is the direction away from the connecting side."""

    connections: int = 0
    up_bytes: int = 0
    down_bytes: int = 0


class Modem:
    """One direction of one connection."""

    def __init__(self, way: Way) -> None:
        self.way = way
        self.moved_bytes = 0
        self._free_s = 0.0  # time at which the last byte taken so far is sent
        self._underway: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(IN_FLIGHT_CHUNKS)

    async def pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copy until the end of the stream. The propagation of a chunk does not hold up the next one."""
        with contextlib.suppress(OSError):
            async with aio.TaskGroup() as group:
                group.create_task(self._take(reader))
                group.create_task(self._give(writer))

    async def _take(self, reader: asyncio.StreamReader) -> None:
        loop, way = asyncio.get_running_loop(), self.way
        while True:
            data = await reader.read(way.chunk_bytes)
            self._free_s = max(self._free_s, loop.time()) + len(data) / way.bytes_s
            await self._underway.put((self._free_s + way.rtt_s / 2, data))
            if not data:
                return
            full_s = way.modem_bytes / way.bytes_s  # seconds in which a full buffer is emptied
            await asyncio.sleep(max(0.0, self._free_s - loop.time() - full_s))

    async def _give(self, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, data = await self._underway.get()
            await asyncio.sleep(due - loop.time())
            if not data:
                writer.write_eof()
                return
            self.moved_bytes += len(data)
            writer.write(data)
            await writer.drain()


class Proxy:
    """Proxy to `port` that listens on a free port of this machine until it is closed."""

    def __init__(self, port: int, way: Way) -> None:
        self.way, self._to = way, port
        self._modems: list[tuple[Modem, Modem]] = []
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Future[None]] = set()

    @property
    def counted(self) -> Counted:
        up, down = (sum(pair[index].moved_bytes for pair in self._modems) for index in (0, 1))
        return Counted(len(self._modems), up, down)

    async def start(self) -> int:
        """Start listening, and return the port."""
        listening = self._socket()
        listening.bind(("127.0.0.1", 0))
        self._server = await asyncio.start_server(self._accept, sock=listening, limit=self.way.chunk_bytes)
        return int(listening.getsockname()[1])

    async def serve_forever(self) -> None:
        assert self._server is not None
        await self._server.serve_forever()

    def close(self) -> None:
        """Refuse new connections, and end the existing ones."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Start a task for a connection. Python 3.11 would log the cancellation of asyncio's own task as an error."""
        connection = asyncio.ensure_future(self._carry(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, from its opening to the end of both directions."""
        up, down = Modem(self.way), Modem(self.way)
        self._modems.append((up, down))
        with contextlib.closing(writer), contextlib.suppress(OSError):  # no server listens there now
            there_reader, there_writer = await self._connected()
            with contextlib.closing(there_writer):
                await asyncio.gather(up.pipe(reader, there_writer), down.pipe(there_reader, writer), return_exceptions=True)

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        there = self._socket()
        try:
            there.setblocking(False)
            await asyncio.get_running_loop().sock_connect(there, ("127.0.0.1", self._to))
            return await asyncio.open_connection(sock=there, limit=self.way.chunk_bytes)
        except BaseException:
            there.close()
            raise

    def _socket(self) -> socket.socket:
        """Open a socket. With a limited link the kernel's buffer is small, so that the queue is in the modem's buffer."""
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if self.way.mbit_s:
            for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
                made.setsockopt(socket.SOL_SOCKET, option, 4 * CHUNK_BYTES)
        return made


@contextlib.contextmanager
def through(port: int, way: Way) -> Iterator[tuple[int, Proxy]]:
    """Run a proxy to `port` in a thread of this process during the block, and yield it with its port."""
    proxy, started = Proxy(port, way), Future[tuple[int, asyncio.AbstractEventLoop, asyncio.Event]]()

    async def run() -> None:
        """Run until the event is set; then asyncio.run ends the connections too."""
        ended = asyncio.Event()
        try:
            started.set_result((await proxy.start(), asyncio.get_running_loop(), ended))
        except OSError as error:
            started.set_exception(error)
            return
        await ended.wait()
        proxy.close()

    thread = threading.Thread(target=aio.run, args=(run(),), daemon=True)
    thread.start()
    here, loop, ended = started.result(10)
    try:
        yield here, proxy
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(10)


@click.command()
@click.option("--to", "port", type=int, required=True, help="Port on this machine.")
@click.option("--rtt-ms", type=float, default=0.0, help="Round-trip time to add.")
@click.option("--mbit-s", type=float, default=0.0, help="Rate in each direction; 0: no limit.")
@click.option("--modem-bytes", type=int, default=MODEM_BYTES, help="Bytes that may wait for the link.")
def main(port: int, rtt_ms: float, mbit_s: float, modem_bytes: int) -> None:
    """Print the port of the proxy, and forward until it is stopped."""

    async def run() -> None:
        proxy = Proxy(port, Way(rtt_ms / 1000, mbit_s, modem_bytes))
        click.echo(await proxy.start())
        sys.stdout.flush()
        await proxy.serve_forever()

    aio.run(run())


if __name__ == "__main__":
    main()
