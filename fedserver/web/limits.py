"""Limits on the page's port before anybody has shown the token: connections, and the time and size of a request's head.

The port shares its descriptors with the federation. So connections are few, an idle one ends soon, and a caller with the token
takes the place of one without.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from attune.fedserver.descriptors import limit, page_connections

REQUEST_S = 10.0  # for a whole request, from the opening of its connection or the end of the answer before
MOST_HEAD = 16_384  # bytes of a request's line and headers
ADMITTED = "attune.admitted"  # key of a request's scope: the holder of its token


class BoundedHttp(H11Protocol):
    """Connection to the page's port. Beyond the limit the oldest connection without the token is dropped."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._deadline: asyncio.TimerHandle | None = None
        self._since = self.loop.time()

    def __repr__(self) -> str:
        return f"BoundedHttp({self.client})"

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > page_connections(limit()):
            others = [other for other in self.connections if isinstance(other, BoundedHttp) and not other._admitted]
            min(others, key=lambda other: other._since)._drop()
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._expect_request()
        else:
            self._cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._admitted and not self.transport.is_closing():
            self.transport.close()  # only callers with the token keep a connection

    @property
    def _admitted(self) -> bool:
        return self.scope is not None and ADMITTED in self.scope

    def _expect_request(self) -> None:
        """Start the time of a request. Further bytes of the same request do not prolong it."""
        if self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_S, self._drop)

    def _cancel(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _drop(self) -> None:
        self.connections.discard(self)  # now: more connections may come before the transport has closed
        self.transport.abort()
