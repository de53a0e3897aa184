"""One connected device: its name, what it declared, and what the server has still to tell it."""

from __future__ import annotations

import asyncio

from attune.common.errors import AttuneError, Unreachable
from attune.common.pb import federation_pb2 as pb
from attune.common.plan import Profile

MAX_UNSENT = 256  # messages to a device that does not read; then it is cut off


class Session:
    """The server's end of a control stream. The newest stream of a device owns its orders; an older one is closed."""

    def __init__(self, name: str, profile: Profile) -> None:
        self.name = name
        self.profile = profile
        self.progress = 0.0  # share of its order that is done
        self._unsent: asyncio.Queue[pb.ServerMessage | None] = asyncio.Queue(MAX_UNSENT)
        self._error: AttuneError | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"Session({self.name}, unsent={self._unsent.qsize()}, closed={self._closed})"

    def send(self, **message: object) -> None:
        """Queues one ServerMessage, given as its one field. Never waits; a full queue closes the session."""
        if self._closed:
            return
        try:
            self._unsent.put_nowait(pb.ServerMessage(**message))  # type: ignore[arg-type]
        except asyncio.QueueFull:
            self.close(
                Unreachable(f"{self.name} does not read what it is sent ({MAX_UNSENT} messages wait): it must reconnect")
            )

    def close(self, error: AttuneError | None = None) -> None:
        """Ends the stream, with `error` if there is one; what is queued is dropped."""
        if self._closed:
            return
        self._closed, self._error = True, error
        while not self._unsent.empty():
            self._unsent.get_nowait()
        self._unsent.put_nowait(None)

    async def next(self) -> pb.ServerMessage | None:
        """The next message to write, or None at the end. Errors: the one the session was closed with."""
        message = await self._unsent.get()
        if message is None and self._error is not None:
            raise self._error
        return message
