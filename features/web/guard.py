"""Access control of the page before any route: token, Host, Origin, security headers, and limits on connections.

The port is for this machine. But a browser on this machine also runs pages of strangers, and other users can reach its
loopback address. So without the token only the health checks answer; a Host name that a stranger's DNS could have pointed here
is refused (DNS rebinding); changes that another site's page asks for are refused (Origin); and the page loads nothing from
elsewhere (Content-Security-Policy).

A browser sends a cookie to every port of a host. So the page's cookie opens the page's files, which tell nothing. The token
itself stays in the memory of the page's tab, which sends it as a header.

The port shares its descriptors with the federation. So connections are few, an idle one ends soon, and a caller with the token
takes the place of one without.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
from collections.abc import Collection
from typing import Any
from urllib.parse import parse_qs, urlencode

import h11
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from attune.features.web.page_tokens import Keyring, PageCaller
from attune.fedserver.process import limit, page_connections

REQUEST_S = 10.0  # for a whole request, from the opening of its connection or the end of the answer before
MOST_HEAD = 16_384  # bytes of a request's line and headers
ADMITTED = "attune.admitted"  # key of a request's scope: the holder of its token
OPEN = ("/healthz", "/readyz")
METRICS = "/metrics"
READING = ("GET", "HEAD")
FILES = "/page/"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
UNKNOWN = (
    "This page needs its token. Open the address that the server printed at its start; `fedserver dashboard` prints it "
    "again. Programs send it as `Authorization: Bearer TOKEN`.\n"
)
WRONG_HOST = "This server does not answer under that name. Use the address that `fedserver dashboard` prints.\n"
TOO_LONG = "The headers of this request are too long.\n"
NOT_ALLOWED = {
    "viewer": "This token is a viewer's: it changes nothing.\n",
    "metrics": "This token only reads /metrics.\n",
}
WRONG_ORIGIN = "Another site asked for this: refused.\n"


class Guard:
    """ASGI middleware that refuses requests.

    `names`: host names under which the page is served. Numeric addresses are always allowed, since no DNS is involved.
    """

    def __init__(self, app: ASGIApp, keys: Keyring, names: Collection[str], port: int) -> None:
        self._app, self._keys, self._names = app, keys, {name.lower() for name in names}
        self._cookie = f"attune-{port}", hmac.digest(keys.files_key, b"files of the page", hashlib.sha256).hex()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope) -> Response | None:
        headers, path, method = Headers(scope=scope), scope["path"], scope["method"]
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MOST_HEAD:
            return PlainTextResponse(TOO_LONG, 431)
        if not self._is_own(headers.get("host", "")):
            return PlainTextResponse(WRONG_HOST, 421)
        if path in OPEN:
            return None
        if path == "/" and method in READING and (given := _asked(scope).get("token")):
            return self._enter(given[-1], scope)
        caller = self._keys.caller_of(_bearer(headers))
        if caller is None:
            if (path == "/" or path.startswith(FILES)) and method in READING and self._has_cookie(headers):
                return None
            return PlainTextResponse(UNKNOWN, 401, {"www-authenticate": "Bearer"})
        if not _may(caller, method, path):
            return PlainTextResponse(NOT_ALLOWED[caller.role], 403)
        scope[ADMITTED] = caller
        return None if method in READING or _is_same_site(headers) else PlainTextResponse(WRONG_ORIGIN, 403)

    def _is_own(self, host: str) -> bool:
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return name.lower() in self._names
        return True

    def _has_cookie(self, headers: Headers) -> bool:
        name, value = self._cookie
        pairs = (pair.strip().partition("=") for pair in headers.get("cookie", "").split(";"))
        return any(key == name and hmac.compare_digest(given.encode(), value.encode()) for key, _, given in pairs)

    def _enter(self, given: str, scope: Scope) -> Response:
        """Move the token into the fragment of the address, which no browser sends, and open the page's files by a cookie."""
        caller = self._keys.caller_of(given)
        if caller is None or caller.role == "metrics":
            return PlainTextResponse(UNKNOWN, 401)
        rest = {name: values for name, values in _asked(scope).items() if name != "token"}
        asked = f"?{urlencode(rest, doseq=True)}" if rest else ""
        answer = RedirectResponse(f"./{asked}#token={given}", 303)  # relative: a proxy may map a path to this page
        answer.set_cookie(*self._cookie, httponly=True, samesite="strict", path="/")
        return answer


def _may(caller: PageCaller, method: str, path: str) -> bool:
    """Return whether a caller's role admits to a request: only operators change anything."""
    if caller.role == "operator":
        return True
    return method in READING and (caller.role == "viewer" or path == METRICS)


def _is_same_site(headers: Headers) -> bool:
    """Return whether a change comes from this page (a browser names the origin) or from a program, which names none."""
    origin = headers.get("origin")
    if origin is None:
        return True
    same = origin.partition("://")[2].lower() == headers.get("host", "").lower()
    return same and headers.get("sec-fetch-site", "same-origin") == "same-origin"


def _asked(scope: Scope) -> dict[str, list[str]]:
    return parse_qs(scope["query_string"].decode("latin-1"))


def _bearer(headers: Headers) -> str:
    kind, _, value = headers.get("authorization", "").partition(" ")
    return value.strip() if kind.lower() == "bearer" else ""


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers[name] = value
        await send(message)

    return sending


# --- before anybody has shown the token


class BoundedHttp(H11Protocol):
    """Connection to the page's port. Beyond the limit the oldest connection without the token is dropped."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._deadline: asyncio.TimerHandle | None = None
        self._since = self.loop.time()

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
