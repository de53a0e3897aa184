"""Which blobs are being uploaded now, so that an update that names one can come before it and wait."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class _Arrival:
    """One blob of one device: how many streams bring it, and whether it is here, or nobody brings it any more."""

    def __init__(self) -> None:
        self.streams = 0
        self.over = asyncio.Event()


class Arrivals:
    """In memory alone. Nobody waits for longer than a stream that brings the blob may stand still."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, str], _Arrival] = {}

    def __repr__(self) -> str:
        return f"Arrivals({sorted(self._of)})"

    @contextmanager
    def stream(self, name: str, digest: str) -> Iterator[None]:
        """A stream that brings this device's blob; if it ends without an error, the blob is here."""
        arrival = self._of.setdefault((name, digest), _Arrival())
        arrival.streams += 1
        try:
            yield
            arrival.over.set()
        finally:
            arrival.streams -= 1
            if not arrival.streams:
                arrival.over.set()
                del self._of[name, digest]

    async def wait(self, name: str, digests: Iterable[str]) -> None:
        """Until none of these is still on its way."""
        for digest in digests:
            if (arrival := self._of.get((name, digest))) is not None:
                await arrival.over.wait()
