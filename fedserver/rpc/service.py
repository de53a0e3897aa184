"""gRPC adapters: messages in, coordinator and updates called, messages out. No decision is made here."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator

import grpc
import msgspec
from google.protobuf.message import DecodeError

from attune.common.errors import LimitExceeded, OrderClosed, SettingError, UpdateRefused
from attune.common.pb import federation_pb2 as pb
from attune.common.pb import federation_pb2_grpc
from attune.common.plan import Profile
from attune.common.wire.frames import FRAME_BYTES
from attune.common.wire.sinks import read_frames
from attune.fedserver.core.coordinator import Coordinator
from attune.fedserver.core.updates import Updates
from attune.fedserver.executors import Executors
from attune.fedserver.identity.registrar import Registrar
from attune.fedserver.pb import admin_pb2 as admin_pb
from attune.fedserver.pb import admin_pb2_grpc
from attune.fedserver.rpc.auth import Auth
from attune.fedserver.rpc.operators import Operators
from attune.fedserver.rpc.sessions import Session
from attune.fedserver.stores.uploads import Target

HELLO_TIMEOUT_S = 30.0
STALL_TIMEOUT_S = 60.0  # without a frame; progress counts, not the total time
BATCH_FRAMES = 4  # frames handed to a disk thread at a time
UPLOAD_KEY = "attune-upload-bin"


class FederationService(federation_pb2_grpc.FederationServicer):
    def __init__(self, coordinator: Coordinator, updates: Updates, registrar: Registrar, auth: Auth) -> None:
        self._coordinator, self._updates, self._registrar, self._auth = coordinator, updates, registrar, auth

    async def Enrol(self, request: pb.EnrolRequest, context: grpc.aio.ServicerContext) -> pb.Certificate:  # noqa: N802
        pem = self._registrar.enrol(self._auth.fingerprint_of(context), request.name, request.csr_der)
        return self._certificate(pem, request.name)

    async def Renew(self, request: pb.RenewRequest, context: grpc.aio.ServicerContext) -> pb.Certificate:  # noqa: N802
        name = self._auth.name_of(context)
        return self._certificate(self._registrar.renew(name, request.csr_der), name)

    def _certificate(self, pem: bytes, name: str) -> pb.Certificate:
        return pb.Certificate(certificate_pem=pem, ca_pem=self._registrar.authority.certificate_pem, name=name)

    async def Connect(self, request_iterator: object, context: grpc.aio.ServicerContext) -> None:  # noqa: N802
        name = self._auth.name_of(context)
        hello = await self._hello(name, context)
        session = await self._coordinator.connect(name, _profile_of(hello, name), hello.software)
        listening = asyncio.create_task(self._listen(session, context))
        try:
            while (message := await session.next()) is not None:
                await context.write(message)
        finally:
            listening.cancel()
            await self._coordinator.disconnect(session)

    async def _hello(self, name: str, context: grpc.aio.ServicerContext) -> pb.Hello:
        try:
            first = await asyncio.wait_for(context.read(), HELLO_TIMEOUT_S)
            if first is grpc.aio.EOF or first.WhichOneof("message") != "hello":
                raise SettingError(f"{name} did not begin its stream with Hello: use a fedclient that speaks protocol 1")
            if first.hello.protocol != 1:
                raise SettingError(
                    f"{name} speaks protocol {first.hello.protocol}; this server speaks 1: update the older side"
                )
            hello: pb.Hello = first.hello
            return hello
        except TimeoutError:
            raise SettingError(f"{name} opened a stream and said nothing for {HELLO_TIMEOUT_S:.0f} s") from None

    async def _listen(self, session: Session, context: grpc.aio.ServicerContext) -> None:
        """Reads what the device says until it hangs up, which ends the session."""
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                match message.WhichOneof("message"):
                    case "trouble":
                        await self._coordinator.trouble(session.name, message.trouble.order_id, message.trouble.reason)
                    case "progress":
                        self._coordinator.progress(session.name, message.progress.order_id, message.progress.done)
        finally:
            session.close()

    async def Submit(self, request: pb.Update, context: grpc.aio.ServicerContext) -> pb.Receipt:  # noqa: N802
        return await self._updates.submit(self._auth.name_of(context), request)


class BlobService:
    """Raw frames: registered with identity serializers, so that bytes pass through untouched."""

    def __init__(self, coordinator: Coordinator, updates: Updates, auth: Auth, executors: Executors) -> None:
        self._coordinator, self._updates, self._auth, self._executors = coordinator, updates, auth, executors

    def handler(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            "attune.v1.Blobs",
            {
                "Download": grpc.unary_stream_rpc_method_handler(self.download, pb.DownloadRequest.FromString, None),
                "Upload": grpc.stream_unary_rpc_method_handler(self.upload, None, pb.UploadReply.SerializeToString),
                "UploadOffset": grpc.unary_unary_rpc_method_handler(
                    self.upload_offset, pb.UploadTarget.FromString, pb.UploadOffsetReply.SerializeToString
                ),
            },
        )

    async def download(self, request: pb.DownloadRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        blob = self._coordinator.book.offer(self._auth.name_of(context), request.digest)
        frames = read_frames(blob.path, request.offset)
        while batch := await self._executors.disk(_take, frames):
            for frame in batch:
                yield frame

    async def upload(self, frames: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> pb.UploadReply:
        name = self._auth.name_of(context)
        target = _target_of(context, name)
        sink = await self._updates.open(name, target)
        skip = sink.offset - target.offset  # what an earlier stream has already brought
        async for batch in _batches(frames, name):
            fresh = []
            for frame in batch:
                fresh.append(frame[skip:])
                skip = max(0, skip - len(frame))
            await self._updates.write(name, target, sink, fresh)
        await self._updates.close(name, target, sink)
        return pb.UploadReply(received=target.size)

    async def upload_offset(self, request: pb.UploadTarget, context: grpc.aio.ServicerContext) -> pb.UploadOffsetReply:
        return pb.UploadOffsetReply(offset=self._updates.offset(self._auth.name_of(context), _target(request)))


class AdminService(admin_pb2_grpc.AdminServicer):
    def __init__(self, operators: Operators) -> None:
        self._operators = operators

    async def Wake(self, request: admin_pb.WakeRequest, context: grpc.aio.ServicerContext) -> admin_pb.WakeReply:  # noqa: N802
        return admin_pb.WakeReply(connected=await self._operators.wake())


def _profile_of(hello: pb.Hello, name: str) -> Profile:
    try:
        return msgspec.json.decode(hello.profile_json, type=Profile)
    except msgspec.DecodeError as error:
        raise SettingError(f"{name} declared its data in a form that cannot be read: {error}") from None


def _take(frames: Iterator[bytes]) -> list[bytes]:
    return list(itertools.islice(frames, BATCH_FRAMES))


async def _batches(frames: AsyncIterator[bytes], name: str) -> AsyncIterator[list[bytes]]:
    """Up to BATCH_FRAMES frames at a time. Errors: LimitExceeded for too long a frame, OrderClosed when nothing comes."""
    batch: list[bytes] = []
    while True:
        try:
            frame = await asyncio.wait_for(anext(frames), STALL_TIMEOUT_S)
        except StopAsyncIteration:
            break
        except TimeoutError:
            raise OrderClosed(f"{name} sent nothing for {STALL_TIMEOUT_S:.0f} s: go on at the offset that is here") from None
        if len(frame) > FRAME_BYTES:
            raise LimitExceeded(f"{name} sent a frame of {len(frame)} bytes; at most {FRAME_BYTES} are allowed")
        batch.append(frame)
        if len(batch) == BATCH_FRAMES:
            yield batch
            batch = []
    if batch:
        yield batch


def _target_of(context: grpc.aio.ServicerContext, name: str) -> Target:
    for key, value in context.invocation_metadata() or ():
        if key == UPLOAD_KEY:
            try:
                return _target(pb.UploadTarget.FromString(value))
            except DecodeError:
                break
    raise UpdateRefused(f"{name} opened an upload without saying what it is ({UPLOAD_KEY})")


def _target(message: pb.UploadTarget) -> Target:
    return Target(message.order_id, message.part, message.digest, message.size, message.offset)
