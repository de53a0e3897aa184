"""The devices' control streams: one a device, the newest. In memory alone: a new process has none."""

from __future__ import annotations

import asyncio

from attune.common.errors import AttuneError, Replaced, Unreachable
from attune.common.exchange.messages import ToDevice
from attune.common.plan import Profile


class RevokedDevices:
    """By name, each with the error that it hears. Nobody comes back; a new process refuses them by their certificates."""

    def __init__(self) -> None:
        self._errors: dict[str, AttuneError] = {}

    def __repr__(self) -> str:
        return f"RevokedDevices({sorted(self._errors)})"

    def add(self, name: str, error: AttuneError) -> bool:
        """Whether it was not barred before."""
        return self._errors.setdefault(name, error) is error

    def check(self, name: str) -> None:
        """Errors: the one that it was barred with."""
        if name in self._errors:
            raise self._errors[name]


MAX_UNSENT = 256  # messages to a device that does not read; then it is cut off


class Stream:
    """The server's end of a control stream. The newest stream of a device owns its orders; an older one is closed."""

    def __init__(self, name: str, profile: Profile, software: str = "", inline_bytes: int = 0, changes: bool = False) -> None:
        self.name = name
        self.profile = profile
        self.software = software
        self.inline_bytes = inline_bytes  # of blobs that the device takes within an order
        self.changes = changes  # whether it takes what is served as its change from what it holds
        self.progress = 0.0  # share of its order that is done, in quarters
        self._unsent: asyncio.Queue[ToDevice | None] = asyncio.Queue(MAX_UNSENT)
        self._error: AttuneError | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"Stream({self.name}, unsent={self._unsent.qsize()}, closed={self._closed})"

    def send(self, message: ToDevice) -> None:
        """Queues one message. Never waits; a full queue closes the stream."""
        if self._closed:
            return
        try:
            self._unsent.put_nowait(message)
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

    async def next(self) -> ToDevice | None:
        """The next message to write, or None at the end. Errors: the one the stream was closed with."""
        message = await self._unsent.get()
        if message is None and self._error is not None:
            raise self._error
        return message


class Streams:
    """Who is connected, those that came first first."""

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}

    def __repr__(self) -> str:
        return f"Streams({sorted(self._streams)})"

    def __len__(self) -> int:
        return len(self._streams)

    def enter(self, stream: Stream) -> bool:
        """A device's messages go to this stream from now on. True if an older one was closed for it."""
        older = self._streams.pop(stream.name, None)
        if older is not None:
            older.close(Replaced(f"{stream.name} opened a newer stream"))
        self._streams[stream.name] = stream
        return older is not None

    def leave(self, stream: Stream) -> bool:
        """The stream is gone. False if the device has a newer one, for which this changes nothing."""
        stream.close()
        if not self.is_current(stream):
            return False
        del self._streams[stream.name]
        return True

    def get(self, name: str) -> Stream | None:
        return self._streams.get(name)

    def is_current(self, stream: Stream) -> bool:
        return self._streams.get(stream.name) is stream

    def profiles(self) -> dict[str, Profile]:
        """What the connected devices declared."""
        return {name: stream.profile for name, stream in self._streams.items()}

    def send(self, name: str, message: ToDevice) -> None:
        """Dropped if the device is not connected."""
        if name in self._streams:
            self._streams[name].send(message)

    def hang_up(self) -> None:
        """Ends every stream, because the server stops; devices come back by themselves when there is one again."""
        for stream in self._streams.values():
            stream.close()
