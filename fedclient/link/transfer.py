"""Moves an order's blobs: several at once, resumed after a break, until they are there or somebody cancels."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
from torch import Tensor

from attune.common.errors import OrderClosed, UnknownBlob, UploadBusy
from attune.common.metrics import metrics_of
from attune.common.pb.federation_pb2 import BlobRef as BlobMessage
from attune.common.pb.federation_pb2 import Update, UploadTarget
from attune.common.wire.frames import read_frames
from attune.common.wire.header import Manifest, layout_of
from attune.common.wire.malformed import BadOffset, DigestMismatch, Truncated
from attune.fedclient.link.buffer import ReceiveBuffer
from attune.fedclient.link.connection import Broken, Connection
from attune.fedclient.messages import BlobRef, Part, Result
from attune.fedclient.work.state import Orders

ROOM_BYTES = 1 << 16  # a blob may carry metadata beyond what its tensors need
ATTEMPTS = 3  # for what should not fail twice: damaged bytes, a server that lost what it had

T = TypeVar("T")


async def together(work: list[Coroutine[Any, Any, T]]) -> list[T]:
    """All results; the first failure cancels the rest and is raised."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def fetch(connection: Connection, ref: BlobRef, expected: Manifest) -> dict[str, Tensor]:
    """The tensors of a blob, checked against `expected`. Errors: UnknownBlob, Forbidden, WireError."""
    for attempt in range(1, ATTEMPTS + 1):
        limit_bytes = layout_of(expected).size + ROOM_BYTES
        buffer = ReceiveBuffer(ref.size, ref.digest, limit_bytes, f"the part {ref.part} from the server")

        async def go_on(buffer: ReceiveBuffer = buffer) -> None:
            await connection.read(ref.digest, buffer.offset, buffer.write)
            if buffer.offset < buffer.size:
                raise Broken("the server ended a download early")

        await connection.persist(go_on)
        try:
            return buffer.finish(expected)
        except DigestMismatch:
            if attempt == ATTEMPTS:
                raise
    raise AssertionError("unreachable")


async def send(connection: Connection, orders: Orders, result: Result, resume: bool) -> bool:
    """Uploads the parts of a result and submits it; whether it came in time. Errors: what the server names."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            await together([_upload(connection, orders, result, part, resume) for part in result.parts])
            return await connection.persist(lambda: connection.submit(_update(result)))
        except OrderClosed:
            return False
        except UnknownBlob:
            if attempt == ATTEMPTS:
                raise
            resume = True
    raise AssertionError("unreachable")


async def _upload(connection: Connection, orders: Orders, result: Result, part: Part, resume: bool) -> None:
    ask, damaged = resume, 0

    async def go_on() -> None:
        nonlocal ask, damaged
        target = UploadTarget(order_id=result.order_id, part=part.part, digest=part.digest, size=part.size)
        if ask:
            target.offset = min(await connection.upload_offset(target), part.size)
        ask = True
        try:
            await connection.upload(target, read_frames(orders.blob(result.order_id, part.part), target.offset))
        except (UploadBusy, Truncated, BadOffset) as error:
            raise Broken(str(error)) from error
        except DigestMismatch as error:
            damaged += 1
            if damaged == ATTEMPTS:
                raise
            raise Broken(str(error)) from error

    await connection.persist(go_on)


def _update(result: Result) -> Update:
    parts = [BlobMessage(part=p.part, digest=p.digest, size=p.size, version=p.version) for p in result.parts]
    metrics = msgspec.json.encode(metrics_of(result))
    return Update(order_id=result.order_id, parts=parts, samples=result.samples, metrics_json=metrics)
