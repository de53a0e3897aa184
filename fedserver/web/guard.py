"""Access control of the page before any route: token, Host, Origin, and the security headers of every answer.

The port is for this machine. But a browser on this machine also runs pages of strangers, and other users can reach its
loopback address. So without the token only the health checks answer; a Host name that a stranger's DNS could have pointed here
is refused (DNS rebinding); changes that another site's page asks for are refused (Origin, a SameSite cookie); and the page
loads nothing from elsewhere (Content-Security-Policy).
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Collection
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN = ("/healthz", "/readyz")
READING = ("GET", "HEAD")
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
WRONG_ORIGIN = "Another site asked for this: refused.\n"


class Guard:
    """ASGI middleware that refuses requests.

    `names`: host names under which the page is served. Numeric addresses are always allowed, since no DNS is involved.
    """

    def __init__(self, app: ASGIApp, token: str, names: Collection[str], port: int) -> None:
        self._app, self._token, self._names, self._port = app, token, {name.lower() for name in names}, port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, _with_headers(send))

    @property
    def _cookie(self) -> str:
        return f"attune-{self._port}"  # the ports of a host share its cookies

    def _refusal(self, scope: Scope) -> Response | None:
        headers, path, method = Headers(scope=scope), scope["path"], scope["method"]
        if not self._is_own(headers.get("host", "")):
            return PlainTextResponse(WRONG_HOST, 421)
        if path in OPEN:
            return None
        if path == "/" and method in READING and (given := _asked(scope).get("token")):
            return self._enter(given[-1], scope)
        if not (self._is_token(_bearer(headers)) or self._is_token(self._from_cookie(headers))):
            return PlainTextResponse(UNKNOWN, 401, {"www-authenticate": "Bearer"})
        return None if method in READING or self._is_same_site(headers) else PlainTextResponse(WRONG_ORIGIN, 403)

    def _is_own(self, host: str) -> bool:
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return name.lower() in self._names
        return True

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._token.encode())

    def _from_cookie(self, headers: Headers) -> str:
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return ""
        return cookie.value if cookie else ""

    def _enter(self, given: str, scope: Scope) -> Response:
        """Move the token from the address into a cookie that scripts cannot read and other sites cannot send."""
        if not self._is_token(given):
            return PlainTextResponse(UNKNOWN, 401)
        rest = {name: values for name, values in _asked(scope).items() if name != "token"}
        answer = RedirectResponse(f"/?{urlencode(rest, doseq=True)}" if rest else "/", 303)
        answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
        return answer

    def _is_same_site(self, headers: Headers) -> bool:
        """Return whether a change comes from this page (a browser names the origin) or from a program with the token."""
        origin = headers.get("origin")
        if origin is None:
            return self._is_token(_bearer(headers))
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
