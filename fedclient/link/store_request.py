"""One HTTP request of a device to an S3 store: to an allowed host, with bounded times, without redirects.

The address is a secret, so no error repeats more of it than the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from typing import TypeVar
from urllib.parse import urlsplit

from attune.common import aio
from attune.common.errors import SettingError, Unreachable
from attune.fedclient.address import Proxy, ServerAddress, store_origin

T = TypeVar("T")
CONNECT_S = 5.0  # for the connection, and for its handshake
STEP_S = 20.0  # for a piece, and for an answer
PIECE_BYTES = 1 << 17  # so a transfer of less than 6.5 kB/s counts as one that stands still


class StoreFailed(Exception):
    """A request failed. unusable: the store cannot be reached from here, or may not be, so another try soon is of no use."""

    def __init__(self, reason: str, unusable: bool = False) -> None:
        super().__init__(reason)
        self.unusable = unusable


class StoreRequest:
    """One request on a connection of its own. Blocking steps run in threads; `close` ends a step that is under way.

    Args:
        url: The signed address.
        allowed: Origins that the device's owner allows, as store_origin returns them.
        proxy: Proxy through which the store is reached, unless the environment excepts its host; None: it is reached directly.
        connect_s: For the connection.
        step_s: For every further step.

    Raises:
        StoreFailed: The address is of another host.
    """

    def __init__(
        self,
        url: str,
        allowed: Collection[str],
        proxy: Proxy | None = None,
        connect_s: float = CONNECT_S,
        step_s: float = STEP_S,
    ) -> None:
        try:
            self.origin = store_origin(url)
        except SettingError:
            raise StoreFailed("the server named an address that is none", unusable=True) from None
        if self.origin not in allowed:
            raise StoreFailed(f"the server named {self.origin}, which --direct-host does not allow", unusable=True)
        parts, place = urlsplit(url), urlsplit(self.origin)
        self._target = f"{parts.path or '/'}?{parts.query}"
        self._step_s = step_s
        self._socket: socket.socket | None = None
        self._connection: http.client.HTTPConnection
        self._context = ssl.create_default_context() if place.scheme == "https" else None
        if self._context is not None:
            self._connection = http.client.HTTPSConnection(
                str(place.hostname), place.port, timeout=connect_s, context=self._context
            )
        else:
            self._connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=connect_s)
        self._proxy = proxy if proxy is not None and proxy.serves(str(place.hostname)) else None
        self._connect_s = 2 * connect_s  # a name is looked up first

    async def get(self, offset: int, size: int) -> AsyncIterator[bytes]:
        """Yield `size` bytes of the object from `offset` on.

        Raises:
            StoreFailed: They did not come.
        """
        await self._begin("GET", {"Range": f"bytes={offset}-", "Accept-Encoding": "identity"})
        answer = await self._answer()
        ranged = answer.status == 206 and (answer.getheader("Content-Range") or "").startswith(f"bytes {offset}-")
        if not ranged and not (answer.status == 200 and offset == 0):
            raise self._refused(answer)
        left = size
        while left:
            piece = await self._step(functools.partial(answer.read, min(PIECE_BYTES, left)))
            if not piece:
                raise StoreFailed(f"{self.origin} ended a download early")
            left -= len(piece)
            yield piece

    async def put(self, pieces: Iterator[bytes], headers: Mapping[str, str]) -> AsyncIterator[int]:
        """Send the pieces as the body; yield the length of each before it is sent. The end means that the store has them.

        Raises:
            StoreFailed: The store did not take them.
        """
        await self._begin("PUT", headers)
        try:
            for piece in pieces:
                yield len(piece)
                await self._step(functools.partial(self._connection.send, piece))
        except StoreFailed as broken:  # a store that refuses may answer before the end
            try:
                answer = await self._answer()
            except StoreFailed:
                raise broken from None
            raise self._refused(answer) from None
        answer = await self._answer()
        if answer.status != 200:
            raise self._refused(answer)

    def close(self) -> None:
        """Close the connection, and end a step that is under way."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for it
        self._connection.close()

    async def _begin(self, method: str, headers: Mapping[str, str]) -> None:
        await self._step(self._connect, self._connect_s, unusable=True)

        def send_head() -> None:
            self._connection.putrequest(method, self._target, skip_accept_encoding=True)
            for name, value in headers.items():
                self._connection.putheader(name, value)
            self._connection.endheaders()

        await self._step(send_head)

    def _connect(self) -> None:
        if self._proxy is None:
            self._connection.connect()
        else:
            host = self._connection.host
            plain = self._proxy.connect(ServerAddress(host, self._connection.port), self._connect_s / 2)
            self._connection.sock = plain if self._context is None else self._context.wrap_socket(plain, server_hostname=host)
        self._socket = self._connection.sock
        self._connection.sock.settimeout(self._step_s)

    async def _answer(self) -> http.client.HTTPResponse:
        return await self._step(self._connection.getresponse)

    def _refused(self, answer: http.client.HTTPResponse) -> StoreFailed:
        """Return the error for an answer that is none of those that were wanted. A redirect is not followed."""
        moved = 300 <= answer.status < 400
        return StoreFailed(f"{self.origin} answered {answer.status}{' (a redirect)' if moved else ''}", unusable=moved)

    async def _step(self, work: Callable[[], T], within_s: float = 0.0, unusable: bool = False) -> T:
        try:
            async with aio.timeout(within_s or self._step_s):
                return await asyncio.to_thread(work)
        except TimeoutError:
            raise StoreFailed(f"{self.origin} does not answer", unusable=True) from None
        except ssl.SSLCertVerificationError as error:
            raise StoreFailed(f"{self.origin} has no certificate that is trusted here ({error.verify_message})", True) from None
        except Unreachable as error:
            raise StoreFailed(f"{self.origin}: {error}", unusable) from None
        except (OSError, http.client.HTTPException, ValueError) as error:  # their text may have the address
            what = getattr(error, "strerror", None) or type(error).__name__
            raise StoreFailed(f"{self.origin}: {what}", unusable) from None
