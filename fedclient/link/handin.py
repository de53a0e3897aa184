"""Hand-in of an order's result: its parts are uploaded, several at once, and the update is submitted until it is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from attune.common.errors import AttuneError, DiskFull, OrderClosed, Stalled, UnknownBlob, UploadBusy, UploadTakenOver
from attune.common.exchange.messages import BlobRef, Update, UploadTarget
from attune.common.faults import fail_at
from attune.common.metrics import metrics_of
from attune.common.wire.blobs import Readable, paced_frames, read_frames
from attune.common.wire.malformed import BadOffset, DigestMismatch, Truncated
from attune.fedclient.link.port import FINAL, Broken, Link
from attune.fedclient.link.transfer import ATTEMPTS, Complain, complaint, persist, together
from attune.fedclient.messages import OrderResult, Part, SendRefused, Sent

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
        self._inline = first and sum(part.size for part in result.parts) <= link.inline_bytes
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
            data = b"".join(read_frames(self._orders.blob(result.order_id, part.part), 0)) if self._inline else b""
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
                # Bytes that arrived damaged once do not go to the store again.
                if damaged or not await self._link.put(target, blob):
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
