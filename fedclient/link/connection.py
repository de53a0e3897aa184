"""The only door to the network of a running device: one control stream, bulk transfers that resume, receipts.

What a peer names (a `kind`) is raised as that error; every way in which a transport can fail is raised as Broken.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any, TypeVar

import grpc
from grpc.aio import AioRpcError

from attune.common.errors import AttuneError, Unreachable
from attune.common.grpc_errors import from_rpc
from attune.common.identity.client_tls import channel_credentials, channel_options
from attune.common.identity.credential import Credential, csr_der, new_key
from attune.common.pb.federation_pb2 import (
    BlobRef,
    Certificate,
    DeviceMessage,
    DownloadRequest,
    Hello,
    Order,
    Progress,
    Receipt,
    RenewRequest,
    ServerMessage,
    Trouble,
    Update,
    UploadOffsetReply,
    UploadReply,
    UploadTarget,
    Work,
)
from attune.common.pb.federation_pb2_grpc import BlobsStub, FederationStub
from attune.common.protocol import PROTOCOL, UPLOAD_KEY
from attune.fedclient import messages
from attune.fedclient.address import Address
from attune.fedclient.backoff import backoff_s
from attune.fedclient.home import Identity

_federation: Any = FederationStub  # generated without types
_blobs: Any = BlobsStub

SAID_AFTER = 4  # failures in a row of one transfer
OUTBOX = 16  # messages that may wait for the stream; progress beyond that is dropped

T = TypeVar("T")
Handle = Callable[[messages.Event], Awaitable[None]]


class Broken(Exception):
    """The transport failed; the same call may succeed later. `connecting`: nobody answered at all."""

    def __init__(self, reason: str, connecting: bool = False) -> None:
        super().__init__(reason)
        self.connecting = connecting


@contextlib.contextmanager
def named_errors() -> Iterator[None]:
    """Inside, failures of calls become AttuneErrors (what the peer named) or Broken (everything else)."""
    try:
        yield
    except AioRpcError as error:
        named = from_rpc(error)
        if named is not None and not isinstance(named, Unreachable):
            raise named from None
        unavailable = error.code() is grpc.StatusCode.UNAVAILABLE
        raise Broken(f"lost the server ({error.code().name.lower()}: {error.details()})", unavailable) from None
    except TimeoutError:
        raise Broken("the server has stopped answering") from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # A channel that is replaced cancels its calls, which is not the same as somebody cancelling us.
        raise Broken("the connection was replaced") from None


class Connection:
    """One device's connection. `say`: for people; `stall_s`: how long a transfer may make no progress at all."""

    def __init__(self, address: Address, identity: Identity, say: Callable[[str], None], stall_s: float = 60.0) -> None:
        self.address, self.identity, self.stall_s = address, identity, stall_s
        self._say = say
        self.open = asyncio.Event()  # while the control stream is
        self._outbox: asyncio.Queue[DeviceMessage] = asyncio.Queue(OUTBOX)
        self._channel = self._new_channel()

    def __repr__(self) -> str:
        return f"<Connection {self.address}, {'open' if self.open.is_set() else 'closed'}>"

    def _new_channel(self) -> grpc.aio.Channel:
        # Our own back-off decides when to try again; gRPC's would make us wait twice.
        own = {"initial": 100, "min": 5000, "max": 1000}
        options = dict(channel_options(self.identity.ca_pem)) | {f"grpc.{w}_reconnect_backoff_ms": ms for w, ms in own.items()}
        credentials = channel_credentials(self.identity.ca_pem, self.identity.credential)
        return grpc.aio.secure_channel(str(self.address), credentials, list(options.items()))

    async def close(self) -> None:
        await self._channel.close()

    async def renew(self) -> Identity:
        """A certificate for a new key, used from the next call on. The caller keeps it. Errors: Broken, CertificateRefused."""
        key = new_key()
        with named_errors():
            request = RenewRequest(csr_der=csr_der(key, self.identity.name))
            answer: Certificate = await _federation(self._channel).Renew(request, timeout=self.stall_s)
        credential = Credential(key, answer.certificate_pem)
        if not credential.fits():
            raise Broken("the server sent a certificate that is not for this device's new key")
        return Identity(self.identity.name, credential, self.identity.ca_pem)

    async def use(self, identity: Identity) -> None:
        """Moves over to a channel under `identity`; transfers on the old one break, and resume."""
        old, self.identity = self._channel, identity
        self._channel = self._new_channel()
        await old.close()

    async def control(self, software: str, profile_json: bytes, handle: Handle) -> None:
        """Opens the control stream and hands over what comes. Always raises: Broken, or what the server named."""
        self._outbox = asyncio.Queue(OUTBOX)
        hello = Hello(protocol=PROTOCOL, software=software, profile_json=profile_json)
        self._outbox.put_nowait(DeviceMessage(hello=hello))
        try:
            with named_errors():
                call = _federation(self._channel).Connect(_messages(self._outbox))
                await call.wait_for_connection()
                self.open.set()
                await handle(messages.Opened())
                async for message in call:
                    if (event := _event_of(message)) is not None:
                        await handle(event)
        finally:
            self.open.clear()
        raise Broken("the server closed the connection")

    def progress(self, order_id: str, done: float) -> None:
        """Dropped while there is no stream, or when it is full."""
        self._tell(DeviceMessage(progress=Progress(order_id=order_id, done=done)))

    def trouble(self, order_id: str, reason: str) -> None:
        """Dropped while there is no stream: the server sends the order again on the next one."""
        self._tell(DeviceMessage(trouble=Trouble(order_id=order_id, reason=reason[:500])))

    def _tell(self, message: DeviceMessage) -> None:
        if self.open.is_set():
            with contextlib.suppress(asyncio.QueueFull):
                self._outbox.put_nowait(message)

    async def persist(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeats `attempt` while it is Broken, whenever there is a stream, until it succeeds or is cancelled."""
        breaks = 0
        while True:
            await self.open.wait()
            try:
                return await attempt()
            except Broken as broken:
                breaks += 1
                if breaks == SAID_AFTER:
                    self._say(f"a transfer keeps failing: {broken} (trying on)")
                await asyncio.sleep(backoff_s(breaks))

    async def read(self, digest: str, offset: int, take: Callable[[bytes], None]) -> None:
        """Hands the blob's bytes from `offset` on to `take`, frame by frame. Errors: Broken, UnknownBlob, Forbidden."""
        with named_errors():
            download = self._channel.unary_stream(
                "/attune.v1.Blobs/Download", request_serializer=DownloadRequest.SerializeToString, response_deserializer=None
            )
            call = download(DownloadRequest(digest=digest, offset=offset))
            while True:
                frame = await asyncio.wait_for(call.read(), self.stall_s)
                if frame is grpc.aio.EOF:
                    return
                take(frame)

    async def upload_offset(self, target: UploadTarget) -> int:
        with named_errors():
            reply: UploadOffsetReply = await _blobs(self._channel).UploadOffset(target, timeout=self.stall_s)
            return int(reply.offset)

    async def upload(self, target: UploadTarget, frames: Iterator[bytes]) -> None:
        """Sends the frames from target.offset on. Errors: Broken (also if the server has not got all), or what it named."""
        with named_errors():
            stream = self._channel.stream_unary(
                "/attune.v1.Blobs/Upload", request_serializer=None, response_deserializer=UploadReply.FromString
            )
            call = stream(metadata=((UPLOAD_KEY, target.SerializeToString()),))
            try:
                for frame in frames:
                    await asyncio.wait_for(call.write(frame), self.stall_s)
                await call.done_writing()
            except asyncio.InvalidStateError:
                # The server has answered before the end; its answer says why.
                pass
            reply = await asyncio.wait_for(call, self.stall_s)
        if reply.received < target.size:
            raise Broken(f"the server has {reply.received} of {target.size} bytes")

    async def submit(self, update: Update) -> bool:
        """Whether the update came in time. Errors: Broken, UpdateRefused and others that the server names."""
        with named_errors():
            receipt: Receipt = await _federation(self._channel).Submit(update, timeout=self.stall_s)
        if receipt.status == Receipt.STATUS_UNSPECIFIED:
            raise AttuneError(f"the server answered an update with a receipt of no known kind: {receipt.message}")
        return receipt.status == Receipt.STATUS_ACCEPTED


async def _messages(outbox: asyncio.Queue[DeviceMessage]) -> AsyncIterator[DeviceMessage]:
    while True:
        yield await outbox.get()


def _event_of(message: ServerMessage) -> messages.Event | None:
    """None for a kind of message that a newer server may send."""
    match message.WhichOneof("message"):
        case "welcome":
            return messages.Welcomed(message.welcome.plan_json)
        case "notice":
            return messages.Noticed(message.notice.text)
        case "order":
            return _ordered(message.order)
        case "finish":
            return messages.Finished(message.finish.message)
    return None


def _ordered(order: Order) -> messages.Ordered | None:
    if order.work not in (Work.WORK_TRAIN, Work.WORK_EVALUATE):
        return None
    downloads, cold_start = _refs(order.downloads), _refs(order.cold_start)
    train = order.work == Work.WORK_TRAIN
    returns, trains = tuple(each.part for each in order.returns), tuple(order.trains)
    return messages.Ordered(messages.Order(order.id, order.round, train, downloads, returns, cold_start, trains))


def _refs(refs: Iterable[BlobRef]) -> tuple[messages.BlobRef, ...]:
    return tuple(messages.BlobRef(ref.part, ref.digest, ref.size, ref.version) for ref in refs)
