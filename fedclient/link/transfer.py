"""Moves an order's blobs: several at once, resumed after a break, until they are there or somebody cancels."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from attune.common.errors import (
    AttuneError,
    DiskFull,
    OrderClosed,
    Stalled,
    UnknownBlob,
    UploadBusy,
    UploadTakenOver,
)
from attune.common.faults import fail_at
from attune.common.metrics import metrics_of
from attune.common.wire.header import Manifest, layout_of
from attune.common.wire.malformed import BadOffset, DigestMismatch, Truncated
from attune.common.wire.pace import paced_frames
from attune.fedclient.backoff import backoff_s
from attune.fedclient.link.buffer import ReceiveBuffer
from attune.fedclient.link.port import FINAL, Broken, Link
from attune.fedclient.messages import BlobRef, Part, Result, SendRefused, Sent, Update, UploadTarget
from attune.fedclient.work.orders import OrderStore

ROOM_BYTES = 1 << 16  # a blob may carry metadata beyond what its tensors need
ATTEMPTS = 3  # for what should not fail twice: damaged bytes, a server that lost what it had
SAID_AFTER = 4  # failures in a row of one transfer
ASKS = 8  # for a blob that the server does not know: half a minute
RESUMES = (UploadBusy, UploadTakenOver, Stalled, Truncated, BadOffset)  # the server says: ask where, and go on there

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
    """The tensors of a blob, checked against `expected`. Errors: UnknownBlob, Forbidden, WireError.

    A server that was started again offers a blob only once it has sent its order again. So a blob that it does not know is
    asked for some times: whoever has another order by then cancels this.
    """
    unknown = 0
    for attempt in range(1, ATTEMPTS + 1):
        limit_bytes = layout_of(expected).size + ROOM_BYTES
        buffer = ReceiveBuffer(ref.size, ref.digest, limit_bytes, f"the part {ref.part} from the server")

        async def go_on(buffer: ReceiveBuffer = buffer) -> None:
            nonlocal unknown
            try:
                await link.read(ref.digest, buffer.offset, buffer.write)
            except UnknownBlob as error:
                unknown += 1
                if unknown == ASKS:
                    raise
                raise Broken(str(error)) from error
            if buffer.offset < buffer.size:
                raise Broken("the server ended a download early")

        await persist(link, go_on, lambda error: say(_complaint(error)))
        try:
            return buffer.finish(expected)
        except DigestMismatch:
            if attempt == ATTEMPTS:
                raise
    raise AssertionError("unreachable")


async def send(link: Link, orders: OrderStore, result: Result, resume: bool, say: Callable[[str], None]) -> Sent | SendRefused:
    """Uploads the parts of a result and submits it; what came of it, for the session.

    A server whose disk is full is told, once, that this device is in trouble, so that the round need not wait; the transfer
    goes on, and what arrives before the round has closed counts. Errors: FINAL.
    """
    said = False

    def complain(error: Exception) -> None:
        nonlocal said
        if not said:
            said = True
            say(_complaint(error))
            if isinstance(error, DiskFull):
                link.trouble(result.order_id, str(error))

    for attempt in range(1, ATTEMPTS + 1):
        uploaded = False
        try:
            await together([_upload(link, orders, result, part, resume, complain) for part in result.parts])
            uploaded = True
            fail_at(orders.who, result.round, "uploaded")
            in_time = await persist(link, lambda: link.submit(_update(result)), complain)
            return Sent(result.order_id, late=not in_time)
        except OrderClosed:
            return Sent(result.order_id, late=True)
        except FINAL:
            raise
        except UnknownBlob as error:
            if attempt == ATTEMPTS:
                return SendRefused(result.order_id, str(error))
            resume = True
        except AttuneError as error:
            # The server has refused the update itself, and waits no longer; of an upload it does not know that it was the last.
            return SendRefused(result.order_id, str(error), known=uploaded)
    raise AssertionError("unreachable")


async def _upload(link: Link, orders: OrderStore, result: Result, part: Part, resume: bool, complain: Complain) -> None:
    ask, damaged = resume, 0

    async def go_on() -> None:
        nonlocal ask, damaged
        target = UploadTarget(result.order_id, part.part, part.digest, part.size)
        if ask:
            target = replace(target, offset=min(await link.upload_offset(target), part.size))
        ask = True
        try:
            await link.upload(target, paced_frames(orders.blob(result.order_id, part.part), target.offset))
        except RESUMES as error:
            raise Broken(str(error)) from error
        except DigestMismatch as error:
            damaged += 1
            if damaged == ATTEMPTS:
                raise
            raise Broken(str(error)) from error

    await persist(link, go_on, complain)


def _complaint(error: Exception) -> str:
    if isinstance(error, DiskFull):
        return f"the server has no room for this update: {error} (trying on)"
    return f"a transfer keeps failing: {error} (trying on)"


def _update(result: Result) -> Update:
    parts = tuple(BlobRef(part.part, part.digest, part.size, part.version) for part in result.parts)
    return Update(result.order_id, parts, result.samples, metrics_of(result))
