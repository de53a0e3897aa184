"""Looks at the source while somebody watches, and tells each watcher the parts that have changed for it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from attune.common import aio
from attune.common.errors import AttuneError
from attune.fedserver.web.actions import Actions
from attune.fedserver.web.facts import PageSource
from attune.fedserver.web.parts import parts

EVERY_S = 0.5
QUIET_S = 15.0  # after so long a word is sent in any case, so that both sides know whether the other is there
WATCHERS = 50


class Hub:
    def __init__(self, source: PageSource, actions: Actions) -> None:
        self._source, self._actions = source, actions
        self._alone = asyncio.Lock()
        self._seen: dict[str, bytes] = {}
        self._seen_at = -EVERY_S
        self._watchers = 0
        self._closing = asyncio.Event()

    def __repr__(self) -> str:
        return f"Hub({self._watchers} watchers)"

    async def parts(self) -> dict[str, bytes]:
        """Each part as JSON, at most EVERY_S old: however many ask, the source is read once. A source that cannot be read
        says why in the part `lost`.
        """
        async with self._alone:
            if time.monotonic() - self._seen_at >= EVERY_S:
                try:
                    found = await asyncio.to_thread(self._look)
                except AttuneError as error:
                    self._seen = self._seen | {"lost": msgspec.json.encode(str(error))}
                else:
                    self._seen = found | {"lost": b'""'}
                self._seen_at = time.monotonic()
            return self._seen

    def _look(self) -> dict[str, bytes]:
        found: dict[str, Any] = parts(self._source.look(), self._actions.names)
        return {name: msgspec.json.encode(part) for name, part in found.items()}

    async def watch(self) -> AsyncIterator[bytes]:
        """Server-sent events: an event a part, at first all of them."""
        if self._watchers >= WATCHERS:
            yield b"event: busy\ndata: \n\n"
            return
        self._watchers += 1
        try:
            told: dict[str, bytes] = {}
            said_at = time.monotonic()
            yield b"retry: 2000\nevent: clock\ndata: %d\n\n" % int(time.time() * 1000)
            while not self._closing.is_set():
                fresh = {name: part for name, part in (await self.parts()).items() if told.get(name) != part}
                told |= fresh
                if fresh or time.monotonic() - said_at > QUIET_S:
                    said_at = time.monotonic()
                    yield (
                        b"".join(b"event: %s\ndata: %s\n\n" % (name.encode(), part) for name, part in fresh.items()) or b":\n\n"
                    )
                with contextlib.suppress(TimeoutError):
                    async with aio.timeout(EVERY_S):
                        await self._closing.wait()
        finally:
            self._watchers -= 1

    def close(self) -> None:
        """Every watcher's stream ends."""
        self._closing.set()
