"""Transfers of an order: its blobs come into preallocated buffers, and its result is handed in.

The parts of a result are uploaded, several at once, and the update is submitted until it is answered. A transfer resumes after
a break until it is done or cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace

from attune.common.errors import (
    AttuneError,
    DiskFull,
    LimitExceeded,
    OrderClosed,
    Stalled,
    UnknownBlob,
    UploadBusy,
    UploadTakenOver,
    WireError,
)
from attune.common.exchange.messages import BlobRef, Update, UploadTarget
from attune.common.faults import fail_at
from attune.common.metrics import metrics_of
from attune.common.protocol import ENCODINGS, HAS_TORCH
from attune.common.wire.blobs import Readable, all_bytes, paced_frames
from attune.common.wire.digest import Digest, check_digest
from attune.common.wire.header import Layout, Limits, Manifest, check_manifest, layout_in, layout_of
from attune.common.wire.malformed import BadOffset, DigestMismatch, Truncated
from attune.fedclient.address import backoff_s
from attune.fedclient.link.port import FINAL, Broken, Link
from attune.fedclient.messages import OrderResult, Part, SendRefused, Sent, SmallerFormUnusable

if TYPE_CHECKING or HAS_TORCH:
    from attune.common.wire.tensors import Tensors, room, views
else:
    from attune.fedclient.light_blobs import room, views
if TYPE_CHECKING:
    from torch import Tensor


class ReceiveBuffer:
    """Buffer for an announced blob of `size` bytes.

    Memory pages are touched only as bytes arrive, so an announcement alone costs little.

    Raises:
        Malformed: bad-digest, before memory is allocated.
        LimitExceeded: The announced size is too large, before memory is allocated.
    """

    def __init__(self, size: int, digest: str, max_bytes: int, who: str = "the peer") -> None:
        check_digest(digest, who)
        if not 0 <= size <= max_bytes:
            raise LimitExceeded(f"{who}: announced {size} bytes; at most {max_bytes} are allowed (server.max_blob_bytes)")
        self.size, self.digest, self.offset = size, digest, 0
        self._limits, self._who = Limits(max_blob_bytes=max_bytes), who
        self._hash = Digest()
        self._buffer_B = room(size)
        self._bytes = np.asarray(self._buffer_B).data

    def write(self, frame: bytes | memoryview) -> None:
        """Append the next bytes.

        Raises:
            LimitExceeded: They are more than announced; the frame is not kept.
        """
        end = self.offset + len(frame)
        if end > self.size:
            raise LimitExceeded(f"{self._who}: sent {end} bytes after it had announced {self.size}")
        self._bytes[self.offset : end] = frame
        self._hash.update(frame)
        self.offset = end

    def finish(self, expected: Manifest | None = None) -> Tensors:
        """Return all tensors as views into the buffer, after it is checked. Errors are those of `checked` and `views`."""
        return views(*self.checked(expected), self._who)

    def checked(self, expected: Manifest | None) -> tuple[Tensor, Layout]:
        """Return the buffer's bytes and layout, after digest, header and (if given) `expected` are checked.

        Raises:
            Truncated: Bytes are missing.
            DigestMismatch: The bytes are not the announced ones.
            Malformed: As in parse_header and check_manifest.
        """
        if self.offset < self.size:
            raise Truncated(f"{self._who}: {self.offset} of {self.size} bytes arrived; go on at offset {self.offset}")
        if self._hash.text != self.digest:
            raise DigestMismatch(f"{self._who}: the bytes are not those of {self.digest[:12]}; send them again")
        layout = layout_in(self._bytes, self._limits, self._who)
        if expected is not None:
            check_manifest(layout.manifest, expected, self._who)
        return self._buffer_B, layout


ROOM_BYTES = 1 << 16  # a blob may carry metadata beyond what its tensors need
ATTEMPTS = 3  # to transfer damaged bytes again, or a blob that the server has lost
SAID_AFTER = 4  # failures in a row of one transfer
ASKS = 8  # for a blob that the server does not know: half a minute

T = TypeVar("T")
Complain = Callable[[Exception], None]


async def together(work: list[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all coroutines and return their results. The first failure cancels the others and is raised."""
    if len(work) < 2:
        return [await coroutine for coroutine in work]
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def persist(link: Link, attempt: Callable[[], Awaitable[T]], complain: Complain) -> T:
    """Repeat `attempt` while the link is Broken or the server's disk is full, whenever there is a stream, until cancelled.

    `complain` is called once, after so many failures that a person should know.
    """
    failures = 0
    while True:
        await link.open.wait()
        try:
            return await attempt()
        except (Broken, DiskFull) as error:
            failures += 1
            if failures == SAID_AFTER:
                complain(error)
        await asyncio.sleep(backoff_s(failures))


async def fetch(link: Link, ref: BlobRef, expected: Manifest, say: Callable[[str], None]) -> dict[str, Tensor]:
    """Fetch the tensors of the blob that is sent for a value; as they came, where they are in an encoding.

    Args:
        link: The way to the server.
        ref: The value.
        expected: The manifest of the value.
        say: Prints a line for the device's user.

    Raises:
        UnknownBlob: The server does not have it.
        Forbidden: It was not offered to this device.
        WireError: It cannot be read.
        SmallerFormUnusable: A smaller form cannot be used; the value itself is still to be tried.
    """
    try:
        return await _fetched(link, ref.sent, expected, say, 1 if ref.smaller else ASKS)
    except (UnknownBlob, WireError) as error:
        if ref.smaller is None:
            raise
        raise SmallerFormUnusable(str(error)) from error


async def _fetched(link: Link, ref: BlobRef, expected: Manifest, say: Callable[[str], None], asks: int) -> dict[str, Tensor]:
    """Fetch the tensors of a blob, checked against `expected` if it is not encoded.

    A restarted server offers a blob only after it has sent its order again. So an unknown blob is asked for `asks` times;
    another order cancels this.
    """
    unknown, limit_bytes, who = 0, layout_of(expected).size + ROOM_BYTES, f"the part {ref.part} from the server"
    if ref.encoding and ref.encoding not in ENCODINGS:
        raise WireError(f"{who} is written as {ref.encoding[:40]!r}: update fedclient")

    if ref.data:
        buffer_B, layout = _inline(ref, limit_bytes, who, None if ref.encoding else tuple(expected.items()))
        copy_B = room(ref.size)  # of the whole, not of single tensors: products depend on their places in memory
        copy_B[:] = buffer_B
        return views(copy_B, layout, who)
    for attempt in range(1, ATTEMPTS + 1):
        buffer = ReceiveBuffer(ref.size, ref.digest, limit_bytes, who)

        async def go_on(buffer: ReceiveBuffer = buffer, attempt: int = attempt) -> None:
            nonlocal unknown
            try:
                await link.read(ref.digest, buffer.offset, buffer.write)
            except UnknownBlob as error:
                unknown += 1
                if unknown == asks:
                    raise
                raise Broken(str(error)) from error
            if buffer.offset < buffer.size:
                raise Broken("the server ended a download early")

        await persist(link, go_on, lambda error: say(complaint(error)))
        try:
            return buffer.finish(None if ref.encoding else expected)
        except DigestMismatch:
            if attempt == ATTEMPTS:
                raise
    raise AssertionError("unreachable")


@lru_cache(maxsize=16)
def _inline(ref: BlobRef, limit_bytes: int, who: str, expected: tuple[Any, ...] | None) -> tuple[Tensor, Layout]:
    """Check a blob within an order, and return it; devices of one process are often served the same one."""
    buffer = ReceiveBuffer(ref.size, ref.digest, limit_bytes, who)
    buffer.write(ref.data)
    return buffer.checked(None if expected is None else dict(expected))


def complaint(error: Exception) -> str:
    """Return the line that tells a person about a transfer that keeps failing."""
    if isinstance(error, DiskFull):
        return f"the server has no room for this update: {error} (trying on)"
    return f"a transfer keeps failing: {error} (trying on)"


RESUMES = (
    UploadBusy,
    UploadTakenOver,
    Stalled,
    Truncated,
    BadOffset,
)  # after these, ask the server for its offset and go on there


class HandInStore(Protocol):
    """Store of the blobs to hand in."""

    who: str

    def blob(self, order_id: str, part: str) -> Path | Readable:
        """Return the bytes of one part of the update."""


async def send(
    link: Link, orders: HandInStore, result: OrderResult, resume: bool, say: Callable[[str], None], attempt: int = 0
) -> Sent | SendRefused:
    """Hand in a result, and return the outcome for the session. attempt: of secure aggregation, whose keys mask its parts.

    A server with a full disk is told once that this device is in trouble, so that the round need not wait. The transfer goes
    on, and an update that arrives before the round closes counts. Errors in FINAL are raised.
    """
    said = False

    def complain(error: Exception) -> None:
        nonlocal said
        if not said:
            said = True
            say(complaint(error))
            if isinstance(error, DiskFull):
                link.trouble(result.order_id, str(error))

    for trial in range(1, ATTEMPTS + 1):
        attempted = _Attempt(link, orders, result, resume, complain, first=trial == 1, attempt=attempt)
        try:
            return Sent(result.order_id, late=not await attempted.run())
        except OrderClosed:
            return Sent(result.order_id, late=True)
        except FINAL:
            raise
        except UnknownBlob as error:
            if trial == ATTEMPTS:
                return SendRefused(result.order_id, str(error))
            resume = True
        except AttuneError as error:
            # After a refused update the server waits no longer. After a refused upload it does not know that no other follows.
            return SendRefused(result.order_id, str(error), known=attempted.refused)
    raise AssertionError("unreachable")


class _Attempt:
    """One try. Small parts travel inside the update if the server allows it; the others are uploaded.

    The update is submitted when the uploads are confirmed. If the server can wait for uploads (Link.waits), the first try
    submits it right after the last byte. Later tries do not: a busy server may read the update before it knows of the uploads.
    """

    def __init__(
        self,
        link: Link,
        orders: HandInStore,
        result: OrderResult,
        resume: bool,
        complain: Complain,
        first: bool = True,
        attempt: int = 0,
    ) -> None:
        self._attempt = attempt
        self._link, self._orders, self._result, self._resume, self._complain = link, orders, result, resume, complain
        self._inline = first and sum([part.size for part in result.parts]) <= link.inline_bytes
        self._at_once = first and link.waits
        self._sent = {part.part: asyncio.Event() for part in (() if self._inline else result.parts)}
        self.refused = False  # what the server refused last was the update itself
        self._answered = False  # the server has taken the update, for which it had all parts

    async def run(self) -> bool:
        """Return whether the update came in time. Errors are those that the server named."""
        uploads = [self._upload(part) for part in self._result.parts if part.part in self._sent]
        first = persist(self._link, self._submit, self._complain)
        return (await together([first, *uploads]))[0] is True

    async def _submit(self) -> bool:
        for sent in self._sent.values():
            await sent.wait()
        fail_at(self._orders.who, self._result.round, "uploaded")
        update = self._update()
        try:
            in_time = await self._link.submit(update)
        except AttuneError:
            self.refused = True
            raise
        self._answered = True
        return in_time

    def _update(self) -> Update:
        result = self._result
        parts = []
        for part in result.parts:
            data = all_bytes(self._orders.blob(result.order_id, part.part)) if self._inline else b""
            parts.append(BlobRef(part.part, part.digest, part.size, part.version, result.encodings.get(part.part, ""), data))
        metrics = msgspec.json.encode(metrics_of(result))
        return Update(result.order_id, tuple(parts), result.samples, metrics, self._attempt)

    async def _upload(self, part: Part) -> None:
        ask, damaged, sent = self._resume, 0, self._sent[part.part]
        blob = partial(self._orders.blob, self._result.order_id, part.part)

        async def go_on() -> None:
            nonlocal ask, damaged
            if self._answered:  # the answer to this upload was lost
                return
            target = UploadTarget(self._result.order_id, part.part, part.digest, part.size)
            try:
                if ask:
                    target = replace(target, offset=min(await self._link.upload_offset(target), part.size))
                ask = True
                frames = paced_frames(blob(), target.offset)
                await self._link.upload(target, _then(frames, sent.set) if self._at_once else frames)
                sent.set()
            except BaseException as error:
                sent.clear()
                if not isinstance(error, (*RESUMES, DigestMismatch)):
                    raise
                damaged += isinstance(error, DigestMismatch)
                if damaged == ATTEMPTS:
                    raise
                raise Broken(str(error)) from error

        await persist(self._link, go_on, self._complain)


def _then(frames: Iterator[bytes], done: Callable[[], None]) -> Iterator[bytes]:
    """Yield the frames, and call `done` when the transport has taken the last one."""
    yield from frames
    done()
