"""Fetches an order's blobs, and what transfers have in common: they go on after a break until they are done or cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from torch import Tensor

from attune.common.errors import DiskFull, UnknownBlob, WireError
from attune.common.exchange.messages import BlobRef
from attune.common.protocol import ENCODINGS
from attune.common.wire.header import Manifest, layout_of
from attune.common.wire.malformed import DigestMismatch
from attune.fedclient.backoff import backoff_s
from attune.fedclient.link.buffer import ReceiveBuffer
from attune.fedclient.link.port import Broken, Link
from attune.fedclient.messages import Unfit

ROOM_BYTES = 1 << 16  # a blob may carry metadata beyond what its tensors need
ATTEMPTS = 3  # for what should not fail twice: damaged bytes, a server that lost what it had
SAID_AFTER = 4  # failures in a row of one transfer
ASKS = 8  # for a blob that the server does not know: half a minute

T = TypeVar("T")
Complain = Callable[[Exception], None]


async def together(work: list[Coroutine[Any, Any, T]]) -> list[T]:
    """All results; the first failure cancels the rest and is raised."""
    if len(work) < 2:
        return [await each for each in work]
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def persist(link: Link, attempt: Callable[[], Awaitable[T]], complain: Complain) -> T:
    """Repeats `attempt` while the link is Broken or the server's disk full, whenever there is a stream, until it is cancelled.

    `complain` hears of it once, when it has failed so often that somebody should know.
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
    """The tensors of the blob that is sent for a value; as they came, where they are in an encoding.

    expected: those of the value. Errors: UnknownBlob, Forbidden, WireError; Unfit where the value itself is still to be tried.
    """
    try:
        return await _fetched(link, ref.sent, expected, say, 1 if ref.smaller else ASKS)
    except (UnknownBlob, WireError) as error:
        if ref.smaller is None:
            raise
        raise Unfit(str(error)) from error


async def _fetched(link: Link, ref: BlobRef, expected: Manifest, say: Callable[[str], None], asks: int) -> dict[str, Tensor]:
    """The tensors of a blob, checked against `expected` if it is in no encoding.

    A server that was started again offers a blob only once it has sent its order again. So a blob that it does not know is
    asked for `asks` times: whoever has another order by then cancels this.
    """
    unknown, limit_bytes, who = 0, layout_of(expected).size + ROOM_BYTES, f"the part {ref.part} from the server"
    if ref.encoding and ref.encoding not in ENCODINGS:
        raise WireError(f"{who} is written as {ref.encoding[:40]!r}: update fedclient")

    def finished(buffer: ReceiveBuffer) -> dict[str, Tensor]:
        return buffer.finish(None if ref.encoding else expected)

    if ref.data:
        buffer = ReceiveBuffer(ref.size, ref.digest, limit_bytes, who)
        buffer.write(ref.data)
        return finished(buffer)
    for attempt in range(1, ATTEMPTS + 1):
        buffer = ReceiveBuffer(ref.size, ref.digest, limit_bytes, who)

        async def go_on(buffer: ReceiveBuffer = buffer) -> None:
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
            return finished(buffer)
        except DigestMismatch:
            if attempt == ATTEMPTS:
                raise
    raise AssertionError("unreachable")


def complaint(error: Exception) -> str:
    """What a person is told of a transfer that keeps failing."""
    if isinstance(error, DiskFull):
        return f"the server has no room for this update: {error} (trying on)"
    return f"a transfer keeps failing: {error} (trying on)"
