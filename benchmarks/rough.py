"""A TCP proxy that cuts, throttles and stops traffic on demand."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from dataclasses import dataclass

READ_BYTES = 1 << 14
UP, DOWN = "up", "down"


@dataclass(frozen=True)
class Cut:
    """Reset of both sides of a connection after this many bytes in one direction."""

    direction: str
    after_bytes: int


class Proxy:
    """Proxy from `port`, a free one of this machine, to `to`, on a thread of its own.

    Args:
        to: Port of the server.
        cuts: Cuts for the first connections that carry as many bytes, one for each; later connections stay.
        rate_bytes: Bytes per second and direction; 0 for no limit. With a limit, this machine's buffers are small.
    """

    def __init__(self, to: int, cuts: list[Cut] | None = None, rate_bytes: float = 0.0) -> None:
        self.to, self.rate_bytes = to, rate_bytes
        self.cuts = list(cuts or [])
        self.silent_until = 0.0
        self.passed = {UP: 0, DOWN: 0}
        self._connected: set[asyncio.StreamWriter] = set()
        self.connections = 0
        self.port = 0
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        ready.wait()

    def silence(self, seconds: float) -> None:
        """Stop all traffic for some seconds. Connections stay open, and new ones are accepted."""
        self.silent_until = time.monotonic() + seconds

    def cut_all(self) -> None:
        """Reset all connections."""
        for writer in list(self._connected):
            self._loop.call_soon_threadsafe(writer.transport.abort)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self, ready: threading.Event) -> None:
        async def start() -> None:
            listener = socket.create_server(("127.0.0.1", 0))
            if self.rate_bytes:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, READ_BYTES)
            server = await asyncio.start_server(self._accept, sock=listener, limit=READ_BYTES)
            self.port = server.sockets[0].getsockname()[1]
            ready.set()

        asyncio.set_event_loop(self._loop)
        self._loop.create_task(start())
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.01))
        self._loop.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.to)
        except OSError:
            writer.transport.abort()
            return
        writers = (writer, there_writer)
        self._connected.update(writers)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await asyncio.gather(self._pipe(UP, reader, there_writer, writers), self._pipe(DOWN, there_reader, writer, writers))
        self._connected.difference_update(writers)
        for each in writers:
            each.close()

    async def _pipe(
        self,
        direction: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        both: tuple[asyncio.StreamWriter, asyncio.StreamWriter],
    ) -> None:
        carried = 0
        while data := await reader.read(READ_BYTES):
            await self._silence_over()
            cut = next(
                (cut for cut in self.cuts if cut.direction == direction and carried + len(data) >= cut.after_bytes), None
            )
            if cut is not None:
                self.cuts.remove(cut)
                data = data[: cut.after_bytes - carried]
            carried += len(data)
            self.passed[direction] += len(data)
            writer.write(data)
            await writer.drain()
            if cut is not None:
                for each in both:
                    each.transport.abort()
                return
            if self.rate_bytes:
                await asyncio.sleep(len(data) / self.rate_bytes)
        await self._silence_over()
        with contextlib.suppress(OSError):
            writer.write_eof()

    async def _silence_over(self) -> None:
        while (left_s := self.silent_until - time.monotonic()) > 0:  # noqa: ASYNC110 - no event tells that a time is over
            await asyncio.sleep(min(left_s, 0.1))
