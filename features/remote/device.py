"""The way of blobs past the server: a device reads and writes the S3 store itself, where its owner and the server allow it.

A store that fails is left alone for a while, and the stream goes on where it stopped. The server decides by itself what each
address is good for; the device trusts neither the address nor the bytes. The address is a secret, so no error repeats more of
it than the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import http.client
import itertools
import socket
import ssl
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Generator, Iterator, Mapping
from typing import TypeVar
from urllib.parse import urlsplit

from attune.common import aio
from attune.common.errors import SettingError, Unreachable
from attune.common.exchange.messages import DirectUpload, SignedUrl, UploadTarget
from attune.common.protocol import DIRECT_PART_BYTES
from attune.common.wire.blobs import FRAME_BYTES, read_frames
from attune.fedclient.address import Proxy, ServerAddress, store_origin
from attune.fedclient.link.port import BlobSource, Broken, Moved

REST_S = 900.0  # for which a store that failed is left alone
FAILURES = 3  # in a row, such as cut connections, after which it counts as failed
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


class DirectRoute:
    """The store of one device's server. Implements fedclient.link.port.BlobRoute.

    Args:
        allowed: Origins that the device's owner allows; none: everything goes by streams.
        say: Prints a line for the device's user.
        proxy: The device's proxy, for stores too.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        allowed: Collection[str],
        say: Callable[[str], None],
        proxy: Proxy | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._allowed, self._say, self._clock, self._proxy = frozenset(allowed), say, clock, proxy
        self._is_offered = self._is_told = False
        self._failures, self._rests_until = 0, 0.0

    @property
    def usable(self) -> bool:
        """True if the store may be tried now."""
        return self._is_offered and self._clock() >= self._rests_until

    def offer(self, address: str) -> None:
        """Take note of the store that the server offers; none for an empty text."""
        try:
            origin = store_origin(address)
        except SettingError:
            origin = ""
        self._is_offered = origin in self._allowed
        if origin and not self._is_offered and not self._is_told:
            self._is_told = True
            self._say(f"the server would let this device use the store {origin} itself; --direct-host allows it")

    async def download(
        self, ask: Callable[[], Awaitable[SignedUrl]], offset: int, size: int, take: Callable[[bytes], None], moved: Moved
    ) -> bool:
        """Pass the bytes of a blob from `offset` on to `take`; return False if they come by the stream.

        Args:
            ask: Asks the server for an address.
            offset: How many bytes are here.
            size: How many the whole blob has.
            take: Takes the bytes, in order.
            moved: Waits, after so many bytes, for the device's allowance.

        Raises:
            Broken: The store failed; the same call goes on by it or, if it failed too often, by the stream.
        """
        place = await ask() if self.usable else SignedUrl()
        if not place.url:
            return False
        with self._failing():
            request = StoreRequest(place.url, self._allowed, self._proxy)
            with contextlib.closing(request):
                async for piece in request.get(offset, size - offset):
                    take(piece)
                    await moved(len(piece))
        self._failures = 0
        return True

    async def upload(
        self, ask: Callable[[DirectUpload], Awaitable[SignedUrl]], target: UploadTarget, source: BlobSource, moved: Moved
    ) -> bool:
        """Write a blob part by part, until the server has checked the whole; return False if it goes by the stream.

        Args:
            ask: Asks the server where the next part goes.
            target: The blob.
            source: Opens its bytes.
            moved: Waits, before so many bytes are sent, for the device's allowance.

        Raises:
            Broken: The store failed, as for `download`.
        """
        if not self.usable:
            return False
        asked = DirectUpload(target, await asyncio.to_thread(part_digests, source))
        written = -1
        while self.usable:
            place = await ask(asked)
            if not place.url:
                return place.offset == target.size
            number, rest = divmod(place.offset, DIRECT_PART_BYTES)
            with self._failing():
                if rest or not 0 <= number < len(asked.part_digests) or place.offset == written:
                    raise StoreFailed("the server names a part that there is not, or that was written", unusable=True)
                request = StoreRequest(place.url, self._allowed, self._proxy)
                with contextlib.closing(request), contextlib.closing(_part(source, place.offset)) as pieces:
                    checksum = b64encode(asked.part_digests[number]).decode()
                    size = min(DIRECT_PART_BYTES, target.size - place.offset)
                    async for count in request.put(pieces, {"Content-Length": str(size), "x-amz-checksum-sha256": checksum}):
                        await moved(count)
            self._failures, written = 0, place.offset
        return False

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Count failures of the store during the block, and leave it alone after too many.

        Raises:
            Broken: The store failed.
        """
        try:
            yield
        except StoreFailed as error:
            self._failures += 1
            if (error.unusable or self._failures >= FAILURES) and self.usable:
                self._failures, self._rests_until = 0, self._clock() + REST_S
                self._say(f"{error}: blobs go through the server for {REST_S / 60:.0f} minutes")
            raise Broken(str(error)) from None


def part_digests(source: BlobSource) -> tuple[bytes, ...]:
    """Return the SHA-256 of each part of a blob."""
    frames, digests = read_frames(source(), 0), []
    while batch := list(itertools.islice(frames, DIRECT_PART_BYTES // FRAME_BYTES)):
        digests.append(hashlib.sha256(b"".join(batch)).digest())
    return tuple(digests)


def _part(source: BlobSource, offset: int) -> Generator[bytes, None, None]:
    """Yield the bytes of the part that begins at `offset`, in pieces."""
    yield from itertools.islice(read_frames(source(), offset, lambda: PIECE_BYTES), DIRECT_PART_BYTES // PIECE_BYTES)
