"""Where updates come in: announced, uploaded, checked, made durable, and only then counted."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import cast

import msgspec

from attune.common.errors import AttuneError, DiskFull, OrderClosed, UnknownBlob, UpdateRefused
from attune.common.methods.method import PartKind
from attune.common.metrics import read_metrics
from attune.fedserver.core.messages import Order, OrderId, Update
from attune.fedserver.core.records import Device, Row
from attune.fedserver.executors import Executors
from attune.fedserver.federation.coordinator import Coordinator
from attune.fedserver.stores.sqlite import Store
from attune.fedserver.stores.upload_file import FileSink
from attune.fedserver.stores.uploads import Target, Uploads


class Updates:
    """Announced blobs on their way in, and the updates that name them."""

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

    async def submit(self, name: str, update: Update) -> str:
        """Takes an update in; returns why it is late, or nothing if it counts.

        Errors: UpdateRefused and WireError, naming what is wrong; UnknownBlob (upload again); DiskFull.
        """
        async with self._turns[name]:  # a device that lost its stream sends again while its first call is still at work
            return await self._submit(name, update)

    async def _submit(self, name: str, update: Update) -> str:
        try:
            order = self._coordinator.book.order(name, update.order_id)
        except OrderClosed as closed:
            return str(closed)
        if name not in self._coordinator.round.reported:
            await self._accept(order, update)
        if await self._coordinator.report(order.id):
            return ""
        await self._executors.disk(self._coordinator.inbox.discard, order.id)
        return f"round {order.id.round} is closed"

    async def _accept(self, order: Order, update: Update) -> None:
        """Into the inbox, or refused: then the round does not wait for this device, and the operator sees why."""
        name = order.id.client
        try:
            row = row_of(order.id, update, self._store.device(name))
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
        await self._executors.disk(self._coordinator.inbox.accept, order.id, row, paths)


def row_of(order: OrderId, update: Update, device: Device | None) -> Row:
    """What is kept of a report. Errors: UpdateRefused for more samples than declared, and metrics that cannot be."""
    declared = device.samples if device is not None and device.samples is not None else 0
    if not 0 <= update.samples <= declared:
        raise UpdateRefused(f"{order.client} claims {update.samples} samples; it declared {declared} when it connected")
    measured = msgspec.structs.asdict(read_metrics(update.metrics_json, order.client)) | {"bytes_up": 0}
    return Row(round=order.round, work=order.work, client=order.client, samples=update.samples, **measured)
