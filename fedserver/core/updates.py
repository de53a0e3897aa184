"""Where updates come in: announced, uploaded, checked, made durable, and only then counted."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from typing import Any, cast

import msgspec

from attune.common.errors import AttuneError, DiskFull, OrderClosed, UnknownBlob, UpdateRefused
from attune.common.methods.method import PartKind
from attune.common.pb import federation_pb2 as pb
from attune.common.wire.sinks import FileSink
from attune.fedserver.core.coordinator import Coordinator
from attune.fedserver.core.orders import OrderId
from attune.fedserver.core.planning import MAX_COUNT
from attune.fedserver.executors import Executors
from attune.fedserver.stores.sqlite import Device, Row, Store
from attune.fedserver.stores.uploads import Target, Uploads

KEPT = ("", "personalized", "common", "local")


class Updates:
    def __init__(self, coordinator: Coordinator, uploads: Uploads, store: Store, executors: Executors) -> None:
        self._coordinator, self._uploads, self._store, self._executors = coordinator, uploads, store, executors
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    # --- uploads

    async def open(self, name: str, target: Target) -> FileSink:
        """Where the frames of an announced blob go. Errors: OrderClosed, UpdateRefused, LimitExceeded, DiskFull."""
        max_bytes = self._check(name, target)
        sink = await self._executors.disk(self._uploads.sink, name, target, max_bytes)
        if target.offset > sink.offset:
            raise UpdateRefused(f"{name} goes on with {target.part} at {target.offset}; only {sink.offset} bytes are here")
        return sink

    async def write(self, name: str, target: Target, sink: FileSink, frames: list[bytes]) -> None:
        """Appends frames. Errors: OrderClosed if a newer stream has taken the upload over, LimitExceeded, DiskFull."""
        await self._executors.disk(self._uploads.write, name, target.part, sink, frames)

    async def close(self, name: str, target: Target, sink: FileSink) -> None:
        """Errors: OrderClosed as for `write`, DigestMismatch, Truncated, DiskFull."""
        await self._executors.disk(self._uploads.complete, name, target.part, sink)

    def offset(self, name: str, target: Target) -> int:
        """How many bytes of an announced blob are here."""
        self._check(name, target)
        return self._uploads.offset(name, target)

    def _check(self, name: str, target: Target) -> int:
        """The largest size this blob may have. Errors: OrderClosed, UpdateRefused."""
        order = self._coordinator.book.order(name, target.order)
        if target.part not in order.returns:
            raise UpdateRefused(
                f"{name} sends {target.part[:40]!r}; its order asks for {', '.join(order.returns) or 'metrics only'}"
            )
        limit = self._coordinator.settings.server.max_blob_bytes
        return min(self._coordinator.engine.max_bytes(cast(PartKind, target.part)), limit)

    # --- updates

    async def submit(self, name: str, update: pb.Update) -> pb.Receipt:
        """Errors: UpdateRefused and WireError, naming what is wrong; UnknownBlob (upload again); DiskFull."""
        async with self._turns[name]:  # a device that lost its stream sends again while its first call is still at work
            return await self._submit(name, update)

    async def _submit(self, name: str, update: pb.Update) -> pb.Receipt:
        try:
            order = self._coordinator.book.order(name, update.order_id)
        except OrderClosed as closed:
            return pb.Receipt(status=pb.Receipt.STATUS_LATE, message=str(closed))
        order_id = OrderId.parse(order.id, name)
        if name not in self._coordinator.machine.reported:
            await self._accept(order, order_id, update)
        if await self._coordinator.report(name, order_id.round):
            return pb.Receipt(status=pb.Receipt.STATUS_ACCEPTED)
        await self._executors.disk(self._coordinator.inbox.discard, order_id)
        return pb.Receipt(status=pb.Receipt.STATUS_LATE, message=f"round {order_id.round} is closed")

    async def _accept(self, order: pb.Order, order_id: OrderId, update: pb.Update) -> None:
        """Into the inbox, or refused: then the round does not wait for this device, and the operator sees why."""
        name = order_id.client
        try:
            row = row_of(order_id, update, self._store.device(name))
            sent = {ref.part: ref.digest for ref in update.parts}
            if sorted(sent) != sorted(order.returns):
                raise UpdateRefused(f"{name} handed in {sorted(sent)}; its order asks for {sorted(order.returns)}")
            blobs = {part: self._uploads.take(name, part, digest) for part, digest in sent.items()}
            row = msgspec.structs.replace(row, bytes_up=sum(blob.size for blob in blobs.values()))
            paths = {part: blob.path for part, blob in blobs.items()}
            max_norm = self._coordinator.settings.server.max_update_norm
            for part, path in paths.items():
                await self._executors.worker(self._coordinator.engine.check, name, cast(PartKind, part), path, max_norm)
        except (UnknownBlob, DiskFull):
            raise
        except AttuneError as refusal:
            await self._coordinator.excuse(name, f"update refused: {refusal}")
            raise
        await self._executors.disk(self._coordinator.inbox.accept, order_id, row, paths)


def row_of(order_id: OrderId, update: pb.Update, device: Device | None) -> Row:
    """The metrics row of an update. Errors: UpdateRefused for numbers that cannot be, or more samples than declared."""
    metrics, name = update.metrics, order_id.client
    declared = device.samples if device is not None and device.samples is not None else 0
    if not 0 <= update.samples <= declared:
        raise UpdateRefused(f"{name} claims {update.samples} samples; it declared {declared} when it connected")

    def checked(field: str, low: float, high: float) -> Any:
        value = getattr(metrics, field)
        if not (math.isfinite(value) and low <= value <= high):
            raise UpdateRefused(f"{name} reports {field} = {value}; it must lie between {low} and {high}")
        return value

    def optional(field: str, low: float, high: float) -> float | None:
        return checked(field, low, high) if metrics.HasField(field) else None

    if metrics.kept not in KEPT:
        raise UpdateRefused(f"{name} keeps {metrics.kept[:40]!r}, which is none of {', '.join(KEPT[1:])}")
    return Row(
        round=order_id.round,
        work=order_id.work,
        client=name,
        samples=update.samples,
        loss=optional("loss", -math.inf, math.inf),
        accuracy_before=optional("accuracy_before", 0.0, 1.0),
        accuracy_after=optional("accuracy_after", 0.0, 1.0),
        test_samples=checked("test_samples", 0, MAX_COUNT),
        bytes_up=0,
        bytes_down=checked("bytes_down", 0, MAX_COUNT),
        seconds=checked("seconds", 0.0, math.inf),
        accuracy_common=optional("accuracy_common", 0.0, 1.0),
        accuracy_local=optional("accuracy_local", 0.0, 1.0),
        kept=metrics.kept or None,
    )
