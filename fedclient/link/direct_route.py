"""The way of blobs past the server: a device reads and writes the S3 store itself, where its owner and the server allow it.

A store that fails is left alone for a while, and the stream goes on where it stopped. The server decides by itself what each
address is good for; the device trusts neither the address nor the bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable, Collection, Generator, Iterator
from pathlib import Path

from attune.common.errors import SettingError
from attune.common.exchange.messages import DirectUpload, SignedUrl, UploadTarget
from attune.common.protocol import DIRECT_PART_BYTES
from attune.common.wire.blobs import FRAME_BYTES, Readable, read_frames
from attune.fedclient.address import Proxy, store_origin
from attune.fedclient.link.port import Broken
from attune.fedclient.link.store_request import PIECE_BYTES, StoreFailed, StoreRequest

REST_S = 900.0  # for which a store that failed is left alone
FAILURES = 3  # in a row, such as cut connections, after which it counts as failed
Source = Callable[[], Path | Readable]
Moved = Callable[[int], Awaitable[None]]


class DirectRoute:
    """The store of one device's server.

    Args:
        allowed: Origins that the device's owner allows; none: everything goes by streams.
        say: Prints a line for the device's user.
        clock: Returns monotonic seconds.
        proxy: The device's proxy, for stores too.
    """

    def __init__(
        self,
        allowed: Collection[str],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        proxy: Proxy | None = None,
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
        self, ask: Callable[[DirectUpload], Awaitable[SignedUrl]], target: UploadTarget, source: Source, moved: Moved
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


def part_digests(source: Source) -> tuple[bytes, ...]:
    """Return the SHA-256 of each part of a blob."""
    frames, digests = read_frames(source(), 0), []
    while batch := list(itertools.islice(frames, DIRECT_PART_BYTES // FRAME_BYTES)):
        digests.append(hashlib.sha256(b"".join(batch)).digest())
    return tuple(digests)


def _part(source: Source, offset: int) -> Generator[bytes, None, None]:
    """Yield the bytes of the part that begins at `offset`, in pieces."""
    yield from itertools.islice(read_frames(source(), offset, lambda: PIECE_BYTES), DIRECT_PART_BYTES // PIECE_BYTES)
