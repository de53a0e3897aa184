"""Distribution of the page's parts: the source is read while browsers watch, and each gets the parts that have changed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from attune.common import aio
from attune.common.errors import AttuneError
from attune.fedserver.web.facts import PageSource
from attune.fedserver.web.parts import parts

EVERY_S = 0.5
QUIET_S = 15.0  # longest silence: then an empty message shows both sides that the other one is there
WATCHERS = 50  # browsers at a time


class Hub:
    """Parts of the page for all browsers that watch it."""

    def __init__(self, source: PageSource) -> None:
        self._source = source
        self._alone = asyncio.Lock()
        self._seen: dict[str, bytes] = {}
        self._seen_at = -EVERY_S
        self._watchers = 0
        self._closing = asyncio.Event()

    async def parts(self) -> dict[str, bytes]:
        """Return each part as JSON, at most EVERY_S old. The part `lost` says why the source cannot be read now."""
        async with self._alone:
            if time.monotonic() - self._seen_at >= EVERY_S:
                try:
                    fresh = await asyncio.to_thread(self._look)
                except AttuneError as error:
                    self._seen = self._seen | {"lost": msgspec.json.encode(str(error))}
                else:
                    self._seen = fresh | {"lost": b'""'}
                self._seen_at = time.monotonic()
            return self._seen

    def _look(self) -> dict[str, bytes]:
        values: dict[str, Any] = parts(self._source.look())
        return {name: msgspec.json.encode(part) for name, part in values.items()}

    async def watch(self, caller: bytes, may_watch: Callable[[], bool]) -> AsyncIterator[bytes]:
        """Yield server-sent events: first every part, then each part that has changed.

        Args:
            caller: The part `caller`, as JSON.
            may_watch: Function that says whether this caller is still admitted.
        """
        if self._watchers >= WATCHERS:
            yield b"event: busy\ndata: \n\n"
            return
        self._watchers += 1
        try:
            sent: dict[str, bytes] = {}
            sent_at = time.monotonic()
            yield b"retry: 2000\nevent: clock\ndata: %d\n\nevent: caller\ndata: %s\n\n" % (int(time.time() * 1000), caller)
            while not self._closing.is_set() and may_watch():
                fresh = {name: part for name, part in (await self.parts()).items() if sent.get(name) != part}
                sent |= fresh
                if fresh or time.monotonic() - sent_at > QUIET_S:
                    sent_at = time.monotonic()
                    yield (
                        b"".join(b"event: %s\ndata: %s\n\n" % (name.encode(), part) for name, part in fresh.items()) or b":\n\n"
                    )
                with contextlib.suppress(TimeoutError):
                    async with aio.timeout(EVERY_S):
                        await self._closing.wait()
        finally:
            self._watchers -= 1

    def close(self) -> None:
        """End the streams of all browsers."""
        self._closing.set()
