"""Routes of the page, and the distribution of its parts: the source is read while browsers watch, each gets what changed."""

from __future__ import annotations

import asyncio
import contextlib
import mimetypes
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from importlib.resources import files
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from attune.common import aio
from attune.common.errors import AttuneError
from attune.features.web.guard import ADMITTED
from attune.features.web.page_tokens import Keyring, PageCaller
from attune.features.web.pages import Actions
from attune.features.web.parts import parts
from attune.features.web.prometheus import TYPE, exposition
from attune.features.web.sources import LedgerSource

PAGE = "index.html"
LONGEST_BODY = 10_000  # bytes
EVERY_S = 0.5
QUIET_S = 15.0  # longest silence: then an empty message shows both sides that the other one is there
WATCHERS = 50  # browsers at a time
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}


def page_files() -> dict[str, tuple[bytes, str]]:
    """Return the files of the page: name -> (bytes, type)."""
    folder = files("attune.features.web") / "page"
    return {
        file.name: (file.read_bytes(), TYPES.get(f".{file.name.rpartition('.')[2]}") or str(mimetypes.guess_type(file.name)[0]))
        for file in folder.iterdir()
        if file.is_file()
    }


class Hub:
    """Parts of the page for all browsers that watch it."""

    def __init__(self, source: LedgerSource) -> None:
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


class Routes:
    """Handlers of all routes."""

    def __init__(self, source: LedgerSource, hub: Hub, actions: Actions, keys: Keyring) -> None:
        self._source, self._hub, self._actions, self._keys = source, hub, actions, keys
        self._files = page_files()

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/", self.page),
                Route("/page/{name}", self.file),
                Route("/api/view", self.view),
                Route("/api/events", self.events),
                Route("/api/attention", self.attention),
                Route("/api/actions/{name}", self.act, methods=["POST"]),
                Route("/metrics", self.metrics),
                Route("/healthz", self.healthy),
                Route("/readyz", self.ready),
            ]
        )

    async def page(self, request: Request) -> Response:
        return self._file(PAGE)

    async def file(self, request: Request) -> Response:
        return self._file(request.path_params["name"])

    def _file(self, name: str) -> Response:
        if name not in self._files:
            return PlainTextResponse("there is no such file\n", 404)
        data, kind = self._files[name]
        return Response(data, media_type=kind)

    async def view(self, request: Request) -> Response:
        """Answer with all parts at once, for programs."""
        encoded = await self._hub.parts()
        return _json({name: msgspec.Raw(part) for name, part in encoded.items()} | {"caller": self._described(request)})

    async def events(self, request: Request) -> Response:
        caller = _caller(request)
        described = msgspec.json.encode(self._described(request))
        stream = self._hub.watch(described, lambda: self._keys.knows(caller))
        return StreamingResponse(stream, media_type="text/event-stream")

    def _described(self, request: Request) -> dict[str, Any]:
        """Return the part `caller`: who looks, and which actions this page offers to it."""
        caller = _caller(request)
        return {"name": caller.name, "role": caller.role, "actions": self._actions.names if caller.role == "operator" else []}

    async def attention(self, request: Request) -> Response:
        try:
            matrix = await asyncio.to_thread(self._source.attention, request.query_params.get("unit", ""))
        except AttuneError as error:
            return _json({"error": str(error)}, 400)
        return _json(asdict(matrix))

    async def metrics(self, request: Request) -> Response:
        try:
            text = await asyncio.to_thread(lambda: exposition(self._source.look()))
        except AttuneError as error:
            return PlainTextResponse(f"{error}\n", 503)
        return Response(text, headers={"content-type": TYPE})

    async def act(self, request: Request) -> Response:
        body = b""
        try:
            async for chunk in request.stream():
                body += chunk
                if len(body) > LONGEST_BODY:
                    return PlainTextResponse("too long\n", 413)
            return _json(await self._actions.do(request.path_params["name"], body, _caller(request).by))
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it
        except AttuneError as error:
            return _json({"error": str(error)}, 400)

    async def healthy(self, request: Request) -> Response:
        """Answer 200 unless a step of the federation is stuck."""
        why = await asyncio.to_thread(self._source.stuck)
        return PlainTextResponse(f"{why}\n" if why else "ok\n", 503 if why else 200)

    async def ready(self, request: Request) -> Response:
        """Answer 200 if devices are served."""
        try:
            why = await asyncio.to_thread(self._source.trouble)
        except AttuneError as error:
            why = str(error)
        return PlainTextResponse(f"{why}\n" if why else "ok\n", 503 if why else 200)


def _caller(request: Request) -> PageCaller:
    caller: PageCaller = request.scope[ADMITTED]
    return caller


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
