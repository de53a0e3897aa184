"""Direct transfers: devices read and write blobs in S3 themselves, by addresses that are signed for one blob and a minute.

Who may read or write what is decided as for streams, at each address. What a device wrote is closed, read back and checked as
if it had come by a stream; only then an update can name it. When its order closes or its device is revoked, it is given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from attune.common import aio
from attune.common.errors import AttuneError, DiskFull, LedgerBusy, LimitExceeded, OrderClosed, UpdateRefused
from attune.common.exchange.messages import DirectUpload, SignedUrl, UploadTarget
from attune.common.protocol import DIRECT_PART_BYTES
from attune.common.wire.blobs import Blob
from attune.common.wire.digest import ALGORITHM, check_digest
from attune.fedserver.core.orderbook import OrderBook
from attune.fedserver.federation.updates import Updates

if TYPE_CHECKING:
    from attune.features.remote.direct_s3 import DirectS3

LOG = logging.getLogger("fedserver")
T = TypeVar("T")
THREADS = 8  # that wait for the store
LOOK_S = 1.0  # between two looks which orders are closed
LAST_S = 5.0  # for giving up what is open when the server ends
LIFETIME_S = 60  # in which a transfer with a signed address must begin; a device asks again after that
SHA256_BYTES = 32


@dataclass(frozen=True)
class DirectObject:
    """An object that a device writes in parts. Nothing can be written to it once it is complete or given up."""

    key: str
    upload: str


@dataclass
class _Begun:
    """Blob that a device writes now, as one part of its answer to an order. One call at a time goes on with it."""

    asked: DirectUpload
    written: DirectObject
    is_complete: bool = False
    blob: Blob | None = None  # once it is checked
    intake: asyncio.Task[None] | None = field(default=None, repr=False)


class DirectTransfers:
    """The direct transfers of all devices, in memory. What a killed process leaves goes at the next start."""

    def __init__(self, store: DirectS3, book: OrderBook, updates: Updates) -> None:
        self._store, self._book, self._updates, self.address = store, book, updates, store.address
        self._begun: dict[tuple[str, str], _Begun] = {}  # by device and part
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="direct")

    async def _call(self, function: Callable[..., T], *arguments: object) -> T:
        """Call the store on a thread of its own kind: a slow store must hold up nothing else."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def download_url(self, name: str, digest: str) -> SignedUrl:
        """Return where a device reads a blob that it was offered; nothing if it comes by Download.

        Raises:
            UnknownBlob: It was not offered to this device.
        """
        self._updates.revoked.check(name)
        return SignedUrl(await self._call(self._store.download_url, self._book.offer(name, digest)))

    async def upload_url(self, name: str, asked: DirectUpload) -> SignedUrl:
        """Return where a device writes the next part that is missing. If none is, check the whole, and return its size.

        Raises:
            OrderClosed, UpdateRefused, LimitExceeded, Malformed: As for the upload of the same blob by a stream.
            DigestMismatch: Other bytes were written; they are removed.
            DiskFull: The disk has no room to check it.
            LedgerBusy: The store cannot be used now.
        """
        target = asked.target
        self._check(name, asked)
        async with self._locks.setdefault((name, target.part), asyncio.Lock()):
            if not self._is_reading(name, asked) and self._updates.offset(name, target) == target.size:
                # A killed server may have left all bytes unchecked.
                await self._updates.complete(name, target, await self._updates.open(name, target))
                return SignedUrl(offset=target.size)
            begun = await self._of(name, asked)
            if not begun.is_complete:
                arrived = await self._arrived(begun)
                missing = [number for number in range(1, len(asked.part_digests) + 1) if number not in arrived]
                if missing:
                    return await self._part_url(begun, missing[0])
                await self._complete(name, begun)
            await self._take_in(name, begun)
            return SignedUrl(offset=target.size)

    def _check(self, name: str, asked: DirectUpload) -> None:
        """Check that the device may upload this blob now, and that its parts can be those of the blob."""
        target, digests = asked.target, asked.part_digests
        self._updates.revoked.check(name)
        most = self._updates.check(name, target)
        check_digest(target.digest, name)
        if not 0 < target.size <= most:
            raise LimitExceeded(f"{name}: announced {target.size} bytes; at most {most} are allowed (server.max_blob_bytes)")
        if len(digests) != -(-target.size // DIRECT_PART_BYTES) or any(len(one) != SHA256_BYTES for one in digests):
            raise UpdateRefused(f"{name} named {len(digests)} parts of a blob of {target.size} bytes: update fedclient")
        if len(digests) == 1 and f"{ALGORITHM}:{digests[0].hex()}" != target.digest:
            raise UpdateRefused(f"{name} named a part that cannot be the blob {target.digest[:19]}")

    def _is_reading(self, name: str, asked: DirectUpload) -> bool:
        begun = self._begun.get((name, asked.target.part))
        return begun is not None and begun.asked == asked and begun.intake is not None and begun.blob is None

    async def _of(self, name: str, asked: DirectUpload) -> _Begun:
        """Return what is begun for the same blob. Another blob of the part takes its place."""
        place = name, asked.target.part
        begun = self._begun.get(place)
        if begun is not None and begun.asked == asked and begun.blob is None:
            return begun
        await self._give_up(place)
        self._begun[place] = _Begun(asked, await self._call(self._store.begin, asked.target.digest))
        return self._begun[place]

    async def _arrived(self, begun: _Begun) -> set[int]:
        try:
            return await self._call(self._store.arrived, begun.written)
        except KeyError:  # somebody gave it up in the store, or it is complete and its call ended before it was known
            await self._call(self._store.abandon, begun.written)
            begun.written = await self._call(self._store.begin, begun.asked.target.digest)
            return set()

    async def _part_url(self, begun: _Begun, number: int) -> SignedUrl:
        offset = (number - 1) * DIRECT_PART_BYTES
        size = min(DIRECT_PART_BYTES, begun.asked.target.size - offset)
        digest = begun.asked.part_digests[number - 1]
        return SignedUrl(await self._call(self._store.part_url, begun.written, number, size, digest), offset)

    async def _complete(self, name: str, begun: _Begun) -> None:
        try:
            await self._call(self._store.complete, begun.written, begun.asked.part_digests)
        except KeyError:
            self._begun.pop((name, begun.asked.target.part), None)
            raise LedgerBusy(f"the parts that {name} wrote are gone from the store: write them again", "") from None
        begun.is_complete = True

    async def _take_in(self, name: str, begun: _Begun) -> None:
        """Read a complete object, as the frames of an upload. A caller that loses patience asks again, and finds it here."""
        if begun.intake is None:
            begun.intake = asyncio.create_task(self._read(name, begun))
        await asyncio.wait([begun.intake])
        if begun.intake.cancelled():
            raise OrderClosed(f"the order {begun.asked.target.order_id} is no longer open")
        try:
            begun.intake.result()
        except (LedgerBusy, DiskFull):
            begun.intake = None  # the object is still there: the next call reads it again
            raise
        except AttuneError:
            await self._give_up((name, begun.asked.target.part))
            raise

    async def _read(self, name: str, begun: _Begun) -> None:
        target = UploadTarget(**vars(begun.asked.target) | {"offset": 0})
        with self._updates.pending_uploads.stream(name, target.digest):
            sink = await self._updates.open(name, target)
            skip = sink.offset  # what a stream has brought before
            pieces = await self._call(self._store.pieces, begun.written)
            while (piece := await self._call(next, pieces, None)) is not None:
                await self._updates.write(name, target, sink, [bytes(piece[skip:])])
                skip = max(0, skip - len(piece))
            begun.blob = await self._updates.complete(name, target, sink)
        self._store.hold(begun.blob, begun.written)

    # --- the end of an order, and of a device

    async def watch(self) -> None:
        """Give up what belongs to closed orders and revoked devices, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            for place, begun in list(self._begun.items()):
                if not self._is_open(place[0], begun.asked.target):
                    await self._give_up(place)
            self._locks = {place: lock for place, lock in self._locks.items() if place in self._begun or lock.locked()}

    def _is_open(self, name: str, target: UploadTarget) -> bool:
        try:
            self._updates.revoked.check(name)
            self._updates.check(name, target)
        except AttuneError:
            return False
        return True

    async def _give_up(self, place: tuple[str, str]) -> None:
        """Give up what a device wrote, unless an accepted update has it."""
        begun = self._begun.pop(place, None)
        if begun is None:
            return
        if begun.intake is not None:
            begun.intake.cancel()
            await asyncio.gather(begun.intake, return_exceptions=True)
        try:
            if begun.blob is not None:
                await self._call(self._store.release, begun.blob)
            else:
                await self._call(self._store.abandon, begun.written)
        except LedgerBusy as error:
            LOG.warning("%s; what %s wrote there goes at the next start", error, place[0])

    async def close(self) -> None:
        """Give up all uploads, at the end of this process."""
        with contextlib.suppress(TimeoutError):
            async with aio.timeout(LAST_S):
                for place in list(self._begun):
                    await self._give_up(place)
        self._threads.shutdown(wait=False, cancel_futures=True)
