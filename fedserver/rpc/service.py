"""Services over gRPC: enrolment, the control stream with its signs of life, the receipt of updates, and transfer of blobs."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from attune.common import aio
from attune.common.errors import AttuneError, LimitExceeded, SettingError, Stalled, UpdateRefused
from attune.common.exchange.messages import (
    Beat,
    Description,
    DownloadRequest,
    EnrolRequest,
    Hello,
    IssuedCertificate,
    Progress,
    Receipt,
    SecureMessage,
    StatisticsReport,
    Trouble,
    UnitReport,
    Update,
    UploadTarget,
)
from attune.common.exchange.protobuf import (
    BLOBS,
    CONNECT,
    DOWNLOAD,
    ENROL,
    FEDERATION,
    RENEW,
    SUBMIT,
    TARGET,
    UPLOAD,
    UPLOAD_OFFSET,
    Call,
)
from attune.common.protocol import PROCESS_KEY, PROTOCOL, UPLOAD_KEY
from attune.common.pulse import Pulse
from attune.common.wire.blobs import FRAME_BYTES, Pace, read_frames
from attune.fedserver.core.orderbook import OrderBook
from attune.fedserver.executors import Executors
from attune.fedserver.federation.members import Members
from attune.fedserver.federation.steps import Turns
from attune.fedserver.federation.streams import WORK, DeviceActivity, DeviceStage, Stream
from attune.fedserver.federation.updates import Updates
from attune.fedserver.identity.registrar import Registrar
from attune.fedserver.ports.blobs import Blobs
from attune.fedserver.rpc.auth import caller
from attune.fedserver.rpc.connection_limiter import address_of
from attune.fedserver.rpc.pulses import DevicePulses, WatchedStream

HELLO_TIMEOUT_S = 30.0
LONGEST_PROCESS = 64  # characters
SILENT_PACES = 3  # after so long a silence, a stream is over that is not watched


class FederationService:
    """Handlers of the calls Enrol, Renew, Connect and Submit."""

    def __init__(self, members: Members, updates: Updates, registrar: Registrar, pulses: DevicePulses, turns: Turns) -> None:
        self._members, self._updates, self._registrar, self._pulses = members, updates, registrar, pulses
        self._turns = turns

    def handler(self) -> grpc.GenericRpcHandler:
        unary = {ENROL: self.enrol, RENEW: self.renew, SUBMIT: self.submit}
        handlers = {
            call.name: grpc.unary_unary_rpc_method_handler(behaviour, call.request.read, call.reply.write)
            for call, behaviour in unary.items()
        }
        connect = grpc.stream_stream_rpc_method_handler(self.connect, CONNECT.request.read, CONNECT.reply.write)
        return grpc.method_handlers_generic_handler(FEDERATION, handlers | {CONNECT.name: connect})

    async def enrol(self, request: EnrolRequest, context: grpc.aio.ServicerContext) -> IssuedCertificate:
        """Issue a device's first certificate. The work goes on if the device vanishes, because the log has it already."""
        return await self._turns.carry(self._enrol(caller().fingerprint, request))

    async def _enrol(self, fingerprint: str, request: EnrolRequest) -> IssuedCertificate:
        pem = await self._registrar.enrol(fingerprint, request.name, request.csr_der)
        self._members.readmit(request.name)
        return self._certificate(pem, request.name)

    async def renew(self, csr_der: bytes, context: grpc.aio.ServicerContext) -> IssuedCertificate:
        name = caller().name
        return self._certificate(await self._turns.carry(self._registrar.renew(name, csr_der)), name)

    def _certificate(self, pem: bytes, name: str) -> IssuedCertificate:
        return IssuedCertificate(pem, self._registrar.authority.certificate_pem, name)

    async def connect(self, request_iterator: object, context: grpc.aio.ServicerContext) -> None:
        name = caller().name
        hello = await self._hello(name, context)
        beat = Beat(self._pulses.pace(name))
        await context.write(beat)
        process = dict(context.invocation_metadata() or ()).get(PROCESS_KEY, "")[:LONGEST_PROCESS]
        if (rival := self._members.rival(name, process)) is not None:
            await self._outlive(rival, beat, context)
        stream = self._members.connect(name, hello, process)
        del hello  # else it would stay as long as the stream
        who = caller()
        watched = self._pulses.open(stream, beat.every_s, lambda: who.left_s)
        listening = asyncio.create_task(self._listen(watched, context))
        try:
            while (message := await stream.next()) is not None:
                who.check_time()
                await context.write(message)
        finally:
            listening.cancel()
            self._pulses.close(watched)
            self._members.disconnect(stream)

    async def _outlive(self, rival: Stream, beat: Beat, context: grpc.aio.ServicerContext) -> None:
        """Wait until the stream of another process with this identity ends: it may be what a crashed machine has left open.

        Raises:
            Replaced: The other process has shown life meanwhile, so this one, which came later, must end.
        """
        pulse = self._pulses.of(rival.name)
        signs, waited_s, step_s = pulse.signs, 0.0, beat.every_s / 8
        while self._members.is_current(rival) and waited_s < SILENT_PACES * max(beat.every_s, pulse.every_s):
            await asyncio.sleep(step_s)
            waited_s += step_s
            if pulse.signs > signs:
                raise self._members.turned_away(rival.name, address_of(context.peer())[0])
            await context.write(beat)

    async def _hello(self, name: str, context: grpc.aio.ServicerContext) -> Hello:
        try:
            async with aio.timeout(HELLO_TIMEOUT_S):
                first = await context.read()
            if not isinstance(first, Hello):
                raise SettingError(
                    f"{name} did not begin its stream with Hello: use a fedclient that speaks protocol {PROTOCOL}"
                )
            if first.protocol != PROTOCOL:
                raise SettingError(
                    f"{name} speaks protocol {first.protocol}; this server speaks {PROTOCOL}: update the older side"
                )
            return first
        except TimeoutError:
            raise SettingError(f"{name} opened a stream and said nothing for {HELLO_TIMEOUT_S:.0f} s") from None

    async def _listen(self, watched: WatchedStream, context: grpc.aio.ServicerContext) -> None:
        """Read what the device says until it hangs up, which ends the stream."""
        stream, pulse = watched.stream, watched.pulse
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                pulse.heard()
                match message:
                    case Trouble(order_id, reason):
                        await self._members.trouble(stream.name, order_id, reason)
                    case SecureMessage():
                        self._members.secure(stream.name, message)
                    case StatisticsReport():
                        self._members.survey.reported(stream.name, message)
                    case UnitReport(verdicts):
                        await self._members.units(stream.name, verdicts)
                    case Description():
                        self._members.described(stream.name, message)
                    case Progress(order_id, done):
                        await self._members.progress(stream.name, order_id, done)
                    case Beat():
                        watched.heard(message)
        except AttuneError as error:  # a message that cannot be read
            stream.close(error)
        finally:
            stream.close()

    async def submit(self, update: Update, context: grpc.aio.ServicerContext) -> Receipt:
        return await self._updates.submit(caller().name, update)


STALL_TIMEOUT_S = 60.0  # without a frame; progress counts, not the total time
BATCH_FRAMES = 2  # full frames handed to a disk thread at a time, while as many more are on their way


class BlobService:
    """Transfer of raw frames, registered with identity serializers, so that bytes are not copied into messages."""

    def __init__(
        self,
        book: OrderBook,
        blobs: Blobs,
        updates: Updates,
        executors: Executors,
        pulses: DevicePulses,
        activity: DeviceActivity,
    ) -> None:
        self._book, self._blobs, self._updates, self._activity = book, blobs, updates, activity
        self._executors, self._pulses = executors, pulses

    def handler(self) -> grpc.GenericRpcHandler:
        unary: dict[Call, Any] = {
            UPLOAD_OFFSET: self.upload_offset,
        }
        handlers = {
            DOWNLOAD.name: grpc.unary_stream_rpc_method_handler(self.download, DOWNLOAD.request.read, DOWNLOAD.reply.write),
            UPLOAD.name: grpc.stream_unary_rpc_method_handler(self.upload, UPLOAD.request.read, UPLOAD.reply.write),
            **{
                call.name: grpc.unary_unary_rpc_method_handler(behaviour, call.request.read, call.reply.write)
                for call, behaviour in unary.items()
            },
        }
        return grpc.method_handlers_generic_handler(BLOBS, handlers)

    async def download(self, request: DownloadRequest, context: grpc.aio.ServicerContext) -> None:
        name = caller().name
        blob = self._book.offer(name, request.digest)
        pace, pulse = Pace(), self._pulses.of(name)
        self._activity.enter(name, DeviceStage.DOWNLOADING)
        frames = read_frames(await self._executors.disk(self._blobs.open, blob), request.offset, pace.frame_bytes)
        with pulse.transfer():
            ahead = asyncio.ensure_future(self._executors.disk(_take, frames))
            try:
                while batch := await ahead:
                    ahead = asyncio.ensure_future(self._executors.disk(_take, frames))  # read while these are sent
                    self._updates.revoked.check(name)
                    caller().check_time()
                    for frame in batch:
                        await context.write(frame)
                        pace.sent(len(frame))
                        pulse.heard()  # the frame found room in the window, so the device reads
            finally:
                await _given_up(ahead)
        self._activity.enter(name, WORK[self._book.work(name)])

    async def upload(self, frames: object, context: grpc.aio.ServicerContext) -> int:
        name = caller().name
        target = _target_of(context, name)
        pulse = self._pulses.of(name)
        with self._updates.pending_uploads.stream(name, target.digest), pulse.transfer():
            sink = await self._updates.open(name, target)
            skip = sink.offset - target.offset  # what an earlier stream has already brought
            written = asyncio.ensure_future(asyncio.sleep(0))
            try:
                while batch := await _batch(context, name, pulse):  # the next comes in while the last is written and hashed
                    caller().check_time()
                    fresh = []
                    for frame in batch:
                        fresh.append(frame[skip:])
                        skip = max(0, skip - len(frame))
                    await written
                    written = asyncio.ensure_future(self._updates.write(name, target, sink, fresh))
                await written
            finally:
                await _given_up(written)
            await self._updates.complete(name, target, sink)
        return target.size

    async def upload_offset(self, target: UploadTarget, context: grpc.aio.ServicerContext) -> int:
        return self._updates.offset(caller().name, target)


async def _given_up(task: asyncio.Future[Any]) -> None:
    """Cancel a task whose result is not needed. Waiting for it avoids a warning of asyncio."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _take(frames: Iterator[bytes]) -> list[bytes]:
    return list(itertools.islice(frames, BATCH_FRAMES))


async def _batch(context: grpc.aio.ServicerContext, name: str, pulse: Pulse) -> list[bytes]:
    """Return the next frames; an empty list at the end. A frame of less than FRAME_BYTES, of a slow link, is written at once.

    Raises:
        LimitExceeded: A frame is too long.
        Stalled: No frame came in time.
    """
    batch: list[bytes] = []
    while len(batch) < BATCH_FRAMES:
        try:
            async with aio.timeout(STALL_TIMEOUT_S):
                frame = await context.read()
        except TimeoutError:
            raise Stalled(f"{name} sent nothing for {STALL_TIMEOUT_S:.0f} s: go on at the offset that is here") from None
        if frame is grpc.aio.EOF:
            break
        pulse.heard()
        if len(frame) > FRAME_BYTES:
            raise LimitExceeded(f"{name} sent a frame of {len(frame)} bytes; at most {FRAME_BYTES} are allowed")
        batch.append(frame)
        if len(frame) < FRAME_BYTES:
            break
    return batch


def _target_of(context: grpc.aio.ServicerContext, name: str) -> UploadTarget:
    for key, value in context.invocation_metadata() or ():
        if key == UPLOAD_KEY:
            try:
                target: UploadTarget = TARGET.read(value)
                return target
            except DecodeError:
                break
    raise UpdateRefused(f"{name} opened an upload without saying what it is ({UPLOAD_KEY})")
