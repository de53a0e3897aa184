"""Intake of updates: announced, uploaded, checked, made durable, and only then counted. An update may wait for its blobs."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec

from attune.common.errors import AttuneError, LimitExceeded, OrderClosed, UnknownBlob, UpdateRefused
from attune.common.exchange.messages import Order, Receipt, Update, UploadTarget
from attune.common.faults import SERVER, fail_at
from attune.common.methods.method import SOLVED
from attune.common.metrics import read_metrics
from attune.common.plan import Profile
from attune.common.protocol import REWRITTEN
from attune.common.task import ScoredTask
from attune.common.wire.blobs import Blob
from attune.fedserver.core.advice import advice
from attune.fedserver.core.messages import Acknowledge, OrderId, Reported
from attune.fedserver.core.records import DeviceRecord, Report
from attune.fedserver.core.round import step
from attune.fedserver.federation.federation_state import FederationState, Handle
from attune.fedserver.federation.secure_rounds import SecureRounds
from attune.fedserver.federation.steps import can_pass
from attune.fedserver.federation.streams import DeviceStage
from attune.fedserver.ports.blobs import Damaged
from attune.fedserver.ports.lab import Arrived
from attune.fedserver.stores.uploads import Sink, Uploads

Excuse = Callable[[str, str], Awaitable[None]]


class _PendingUpload:
    """Upload of one blob: the number of streams that send it, and an event for its end."""

    def __init__(self) -> None:
        self.streams = 0
        self.over = asyncio.Event()


class PendingUploads:
    """Blobs that are being uploaded, in memory only. A wait is as long as a stream may stand still, at most."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, str], _PendingUpload] = {}

    def __repr__(self) -> str:
        return f"PendingUploads({sorted(self._of)})"

    @contextmanager
    def stream(self, name: str, digest: str) -> Iterator[None]:
        """Count a stream that sends this device's blob during the block. Without an error, the blob has arrived."""
        arrival = self._of.setdefault((name, digest), _PendingUpload())
        arrival.streams += 1
        try:
            yield
            arrival.over.set()
        finally:
            arrival.streams -= 1
            if not arrival.streams:
                arrival.over.set()
                del self._of[name, digest]

    async def wait(self, name: str, digests: Iterable[str]) -> None:
        """Wait until none of these blobs is being uploaded."""
        for digest in digests:
            if (arrival := self._of.get((name, digest))) is not None:
                await arrival.over.wait()


class Updates:
    """Announced blobs that arrive, and the updates that name them."""

    def __init__(self, state: FederationState, handle: Handle, excuse: Excuse, secure: SecureRounds) -> None:
        """Take over the parts of a federation.

        Args:
            state: The federation.
            handle: Tells the round what has happened.
            excuse: Lets the round go on without a device, for a reason.
            secure: The exchanges of the round that is being closed.
        """
        self._state, self._handle, self._excuse, self._secure = state, handle, excuse, secure
        self._settings, self._executors, self._uploads = state.settings.server, state.executors, Uploads(state.storage)
        self.pending_uploads, self.revoked = PendingUploads(), state.revoked
        self._alone: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    # --- uploads

    async def open(self, name: str, target: UploadTarget) -> Sink:
        """Return the sink for the frames of an announced blob.

        Raises:
            OrderClosed: The order is not open.
            UpdateRefused: The order does not ask for this part, or the offset is behind the received bytes.
            LimitExceeded: The blob is too large.
            DiskFull: The disk has no room.
        """
        self.revoked.check(name)
        max_bytes = self.check(name, target)
        sink = await self._executors.disk(self._uploads.sink, name, target, max_bytes)
        if target.offset > sink.offset:
            raise UpdateRefused(f"{name} goes on with {target.part} at {target.offset}; only {sink.offset} bytes are here")
        self._state.activity.enter(name, DeviceStage.SENDING)
        return sink

    async def write(self, name: str, target: UploadTarget, sink: Sink, frames: Sequence[bytes]) -> None:
        """Write the next frames.

        Raises:
            UploadTakenOver: A newer stream continues the upload.
            LimitExceeded: More bytes came than were announced.
            DiskFull: The disk has no room.
        """
        self.revoked.check(name)
        await self._executors.disk(self._uploads.write, name, target.part, sink, frames)

    async def complete(self, name: str, target: UploadTarget, sink: Sink) -> Blob:
        """Check the digest of a whole upload, and return it.

        Raises:
            UploadTakenOver: A newer stream continues the upload.
            Truncated: Bytes are missing.
            DigestMismatch: The bytes are not the announced ones.
            DiskFull: The disk has no room.
        """
        self.revoked.check(name)
        blob = await self._executors.disk(self._uploads.complete, name, target.part, sink)
        _upload_is_whole(OrderId.parse(target.order_id, name))
        return blob

    def offset(self, name: str, target: UploadTarget) -> int:
        """Return how many bytes of an announced blob are here."""
        self.check(name, target)
        return self._uploads.offset(name, target)

    def check(self, name: str, target: UploadTarget) -> int:
        """Return the largest size that this blob may have.

        Raises:
            OrderClosed: The order is not open.
            UpdateRefused: The order does not ask for this part.
        """
        returns = self._parts_for(name, target.order_id)
        if target.part not in returns:
            raise UpdateRefused(f"{name} sends {target.part[:40]!r}; its order asks for {', '.join(returns) or 'metrics only'}")
        limit = self._settings.max_blob_bytes
        return min(self._state.max_bytes[target.part], limit)

    def _parts_for(self, name: str, order_id: str) -> Sequence[str]:
        """Return the parts that a device may upload now; under secure aggregation only when masked updates are waited for."""
        if not self._secure.on:
            return self._state.book.order(name, order_id).returns
        if self._secure.awaits(OrderId.parse(order_id, name)):
            return self._masked_parts(OrderId.parse(order_id, name).round)
        raise OrderClosed(f"no masked update for {order_id} is waited for")

    def _masked_parts(self, number: int) -> Sequence[str]:
        """Return the parts that each device of a round hands in behind masks: sums over samples are of the first one."""
        return [part for part in sorted(self._state.max_bytes) if part != SOLVED or number == 1]

    # --- updates

    async def submit(self, name: str, update: Update) -> Receipt:
        """Take in an update. If its blobs are still being uploaded, wait for them.

        Raises:
            UpdateRefused: The update does not fit its order; the message says how.
            WireError: A blob is malformed.
            UnknownBlob: A blob is not here; it must be uploaded again.
            DiskFull: The disk has no room.
        """
        await self.pending_uploads.wait(name, [ref.digest for ref in update.parts])
        return await self._state.turns.carry(self._submit(name, update))

    async def _submit(self, name: str, update: Update) -> Receipt:
        async with self._alone[name]:  # a device that lost its stream sends again while its first call is still at work
            self.revoked.check(name)
            if update.attempt:
                return await self._submit_masked(name, update)
            try:
                order = self._state.book.order(name, update.order_id)
            except OrderClosed as closed:
                return Receipt(late=str(closed))
            order_id, loss = OrderId(order.work, order.round, name), None
            if name not in self._state.round.reported:
                loss = (await self._accept(order_id, order, update)).loss
            if await self.report(order_id, loss):
                return Receipt()
            await self._executors.disk(self._state.inbox.discard, order_id)
            return Receipt(late=f"round {order.round} is closed")

    async def report(self, order: OrderId, loss: float | None = None) -> bool:
        """Tell the round that the update or evaluation for this order is durable in the inbox.

        Returns:
            Whether it counts; False if it is late.
        """
        state = self._state
        event = Reported(order.client, order.round, state.clock.monotonic(), order.work, loss)
        counts = await state.turns.step(self._handle, event)
        if counts is None:
            # A later step has failed, but the update is durable. So the present round decides whether it counts.
            taken = step(state.rules, state.round, event, state.clock.unix())
            state.round, counts = taken.state, Acknowledge(order.client, accepted=True) in taken.effects
        if (stage := state.activity.stage(order.client)) is not None and stage is not DeviceStage.ABSENT:
            state.activity.enter(order.client, DeviceStage.WAITING)
        return counts

    async def _submit_masked(self, name: str, update: Update) -> Receipt:
        """Take in the masked parts of an update, which the round's exchange waits for."""
        order_id = OrderId.parse(update.order_id, name)
        if not self._secure.awaits(order_id, update.attempt):
            return Receipt(late=f"attempt {update.attempt} of {order_id} is over")
        sent, here = {ref.part: ref.digest for ref in update.parts}, dict[str, Blob]()
        try:
            asked = self._masked_parts(order_id.round)
            if sorted(sent) != asked or any(ref.encoding for ref in update.parts):
                raise UpdateRefused(f"{name} handed in {sorted(sent)}; {asked} are masked")
            here |= await self._taken_in(order_id, update)
            for part, blob in here.items():
                await self._state.lab.arrive(name, part, blob, "", served=True, max_norm=0.0)
            await self._executors.disk(self._state.inbox.accept_masked, order_id, update.attempt, here)
        except UnknownBlob:
            raise
        except AttuneError as refusal:
            if not can_pass(refusal):
                self._secure.drop(name, str(refusal))
            raise
        await self._executors.disk(self._uploads.discard, set(here.values()))
        return Receipt() if self._secure.accepted(order_id, update.attempt) else Receipt(late="its exchange is over")

    async def _accept(self, order_id: OrderId, order: Order, update: Update) -> Report:
        """Put the update and its report into the inbox. If it is refused, the round does not wait for the device any longer."""
        name, here = order_id.client, dict[str, Blob]()
        try:
            stream = self._state.streams.get(name)
            declared = await self._state.storage.ledger.device(name) if stream is None else stream.profile
            row = row_of(order_id, update, declared, self._state.task)
            sent = {ref.part: ref.digest for ref in update.parts}
            returns = sorted(order.returns) if not self._secure.on else []  # masked parts come later
            if sorted(sent) != returns:
                raise UpdateRefused(f"{name} handed in {sorted(sent)}; its order asks for {returns}")
            if wrong := [ref.part for ref in update.parts if ref.encoding != order.encodings.get(ref.part, "")]:
                raise UpdateRefused(f"{name} handed in {wrong} in another encoding than its order asks for")
            blobs = await self._taken_in(order_id, update)
            here |= blobs
            row = msgspec.structs.replace(row, bytes_up=sum([blob.size for blob in blobs.values()]))
            arrived = await self._arrive(name, order, blobs)
            values = {part: part_update.blob for part, part_update in arrived.items()}
            facts = {part: part_update.facts for part, part_update in arrived.items() if part_update.facts}
            await self._executors.disk(self._state.inbox.accept, order_id, row, values, facts)
        except UnknownBlob:
            raise
        except AttuneError as refusal:
            # An upload that begins anew takes away what is here, to go on with it: that is no damage.
            parts = {blob.name: part for part, blob in here.items()}
            if isinstance(refusal, Damaged) and refusal.name in parts:
                raise UnknownBlob(f"{name} sends {parts[refusal.name]} again: upload it, then submit again") from None
            if not can_pass(refusal):
                await self._excuse(name, f"update refused: {refusal} - {advice(refusal.kind)}")
            raise
        await self._executors.disk(self._uploads.discard, {*blobs.values(), *values.values()})
        return row

    async def _arrive(self, name: str, order: Order, blobs: Mapping[str, Blob]) -> dict[str, Arrived]:
        """Let the lab decode and check the parts. Parts that are kept as they came are made durable meanwhile."""
        kept = [blob for part, blob in blobs.items() if order.encodings.get(part, "") not in REWRITTEN]
        arrived, _ = await self._executors.both(
            lambda: self._checked(name, order, blobs), lambda: self._executors.disk(self._uploads.sync, kept)
        )
        return arrived

    async def _checked(self, name: str, order: Order, blobs: Mapping[str, Blob]) -> dict[str, Arrived]:
        lab, served = self._state.lab, {ref.part for ref in order.downloads}
        max_norm = self._settings.max_update_norm
        return {
            part: await lab.arrive(name, part, blob, order.encodings.get(part, ""), part in served, max_norm)
            for part, blob in blobs.items()
        }

    async def _taken_in(self, order_id: OrderId, update: Update) -> dict[str, Blob]:
        """Return the blobs of an update. Those that came within it are stored as if they were uploaded."""
        name, limit, blobs = order_id.client, self._settings.inline_bytes, dict[str, Blob]()
        if sum([len(ref.data) for ref in update.parts]) > limit:
            raise LimitExceeded(f"{name} sent more than {limit} bytes of blobs within its update: upload them")
        for ref in update.parts:
            if not ref.data:
                blobs[ref.part] = await self._executors.disk(self._uploads.take, name, ref.part, ref.digest)
                continue
            target = UploadTarget(update.order_id, ref.part, ref.digest, ref.size)
            max_bytes = self.check(name, target)
            blobs[ref.part] = await self._executors.disk(self._uploads.bring, name, target, max_bytes, ref.data)
            _upload_is_whole(order_id)
        return blobs


def _upload_is_whole(order_id: OrderId) -> None:
    fail_at(SERVER, order_id.round, "upload-whole")


def row_of(order: OrderId, update: Update, device: DeviceRecord | Profile | None, task: ScoredTask = "classes") -> Report:
    """Return what is kept of a report.

    Raises:
        UpdateRefused: It claims more samples than the device declared, or has impossible metrics.
    """
    declared = device.samples if device is not None and device.samples is not None else 0
    if not 0 <= update.samples <= declared:
        raise UpdateRefused(f"{order.client} claims {update.samples} samples; it declared {declared} when it connected")
    measured = msgspec.structs.asdict(read_metrics(update.metrics_json, order.client, task)) | {"bytes_up": 0}
    return Report(round=order.round, work=order.work, client=order.client, samples=update.samples, **measured)
