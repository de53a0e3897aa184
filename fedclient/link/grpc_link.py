"""The link over the network: one control stream, bulk transfers that resume, receipts; all on one connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any, NoReturn

import grpc
import msgspec

from attune.common import aio
from attune.common.errors import AttuneError, CertificateRefused, FingerprintMismatch, Unreachable
from attune.common.identity.client_tls import channel_credentials, channel_options
from attune.common.identity.credential import Credential, csr_der, needs_renewal, new_key
from attune.common.pb import federation_pb2 as pb
from attune.common.pb.federation_pb2_grpc import BlobsStub, FederationStub
from attune.common.plan import Profile
from attune.common.protocol import INLINE_BYTES, PROTOCOL, SPOKEN, UPLOAD_KEY
from attune.common.pulse import Pulse
from attune.fedclient.address import Address
from attune.fedclient.home import Identity
from attune.fedclient.link.diagnose import diagnose
from attune.fedclient.link.enrol import DIAGNOSIS_S, check_issued
from attune.fedclient.link.port import Broken, Handle
from attune.fedclient.link.protobuf import event_of, target_message, update_message
from attune.fedclient.link.wire import Wire
from attune.fedclient.messages import Opened, Update, UploadTarget
from attune.fedclient.thrift import Allowance

_federation: Any = FederationStub  # generated without types
_blobs: Any = BlobsStub

OUTBOX = 16  # messages that may wait for the stream; progress beyond that is dropped
CONNECT_MS = 5000  # for a connection and its handshake
FIRST_WORD_S = 30.0  # from opening the stream to the first message on it
LAST_WORD_S = 5.0  # to a server that does not answer it


class GrpcLink:
    """One device's connection. `keep`: stores a renewed identity. `stall_s`: how long a transfer may make no progress."""

    def __init__(
        self,
        address: Address,
        identity: Identity,
        keep: Callable[[Identity], None],
        allowance: Allowance | None = None,
        stall_s: float = 60.0,
    ) -> None:
        self.address, self.identity, self.stall_s = address, identity, stall_s
        self._keep, self._allowance = keep, allowance or Allowance(0.0)
        self.open = asyncio.Event()
        self.inline_bytes, self.waits = 0, False
        self._outbox: asyncio.Queue[pb.DeviceMessage | None] = asyncio.Queue(OUTBOX)
        self._over = asyncio.Event()  # the present stream is gone
        self._pulse = Pulse()
        self._tasks: set[asyncio.Task[None]] = set()
        self._wire = self._new_wire()

    def __repr__(self) -> str:
        return f"<GrpcLink of {self.name} to {self.address}, {'open' if self.open.is_set() else 'closed'}>"

    @property
    def name(self) -> str:
        return self.identity.name

    # --- the channel

    def _new_wire(self) -> Wire:
        connecting = ("grpc.min_reconnect_backoff_ms", CONNECT_MS)  # the name that gRPC has for it
        options = [*channel_options(self.identity.ca_pem), connecting]
        credentials = channel_credentials(self.identity.ca_pem, self.identity.credential)
        return Wire(grpc.aio.secure_channel(str(self.address), credentials, options))

    async def _replace(self, reason: str) -> None:
        """Moves over to a new channel; what is under way on the old one is Broken, and goes on."""
        old, self._wire = self._wire, self._new_wire()
        await old.cut(reason)

    async def close(self) -> None:
        await self._wire.cut("this device is ending")

    async def renew(self) -> bool:
        """A certificate for a new key, kept and used from the next call on, once the present one is two thirds through."""
        if not needs_renewal(self.identity.credential.certificate_pem, datetime.now(timezone.utc)):
            return False
        key = new_key()
        request = pb.RenewRequest(csr_der=csr_der(key, self.identity.name))
        with self._wire.call(_federation(self._wire.channel).Renew(request, timeout=self.stall_s)) as call:
            answer: pb.Certificate = await call
        credential = Credential(key, answer.certificate_pem)
        try:
            check_issued(credential, self.identity.ca_pem, self.identity.name)
        except (CertificateRefused, FingerprintMismatch) as error:
            raise Broken(str(error)) from None
        self.identity = Identity(self.identity.name, credential, self.identity.ca_pem)
        self._keep(self.identity)
        await self._replace("moved over to a connection under the renewed certificate")
        return True

    async def diagnosis(self) -> str:
        address, identity = self.address, self.identity
        # This channel would go on trying by a clock of its own, and answer the next call with a failure of before.
        await self._replace("could not connect")
        error = await asyncio.to_thread(diagnose, address.host, address.port, identity.ca_pem, identity.credential, DIAGNOSIS_S)
        if isinstance(error, Unreachable):
            return str(error)
        raise error

    # --- the control stream

    async def control(self, software: str, profile: Profile, handle: Handle) -> NoReturn:
        self._outbox, self._pulse = asyncio.Queue(OUTBOX), Pulse()
        self._over.clear()
        self.inline_bytes, self.waits = 0, False
        profile_json = msgspec.json.encode(profile)
        hello = pb.Hello(protocol=PROTOCOL, software=software, profile_json=profile_json)
        hello.inline_bytes, hello.encodings[:] = INLINE_BYTES, SPOKEN
        waiting = asyncio.get_running_loop().call_later(FIRST_WORD_S, self._gone)
        tasks: list[asyncio.Task[None]] = []
        try:
            with self._wire.call(_federation(self._wire.channel).Connect()) as call:
                await call.write(pb.DeviceMessage(hello=hello))
                self.open.set()
                tasks.append(asyncio.create_task(_speak(call, self._outbox)))
                await handle(Opened())
                while (message := await call.read()) is not grpc.aio.EOF:
                    waiting.cancel()
                    self._pulse.heard()
                    if message.HasField("beat") and not self._pulse.paced:
                        tasks.append(self._keep_pace(message.beat.every_s))
                    if message.HasField("welcome"):
                        self.inline_bytes = min(message.welcome.inline_bytes, INLINE_BYTES)
                        self.waits = message.welcome.waits
                    if (event := event_of(message)) is not None:
                        await handle(event)
        finally:
            self.open.clear()
            self._over.set()
            waiting.cancel()
            for task in tasks:
                task.cancel()
        raise Broken("the server closed the connection")

    def _keep_pace(self, every_s: float) -> asyncio.Task[None]:
        """From now on this side beats as the server does, and gives up a server that is silent."""
        self._pulse.keep(every_s)
        beat = pb.DeviceMessage(beat=pb.Beat(every_s=every_s))

        def say() -> None:
            if self._outbox.empty():
                self._tell(beat)

        say()
        return asyncio.create_task(self._pulse.watch(say, self._gone))

    def _gone(self) -> None:
        """The server is silent: nothing more is expected of this connection."""
        replacing = asyncio.create_task(self._replace("the server has stopped answering"))
        self._tasks.add(replacing)
        replacing.add_done_callback(self._tasks.discard)

    def progress(self, order_id: str, done: float) -> None:
        self._tell(pb.DeviceMessage(progress=pb.Progress(order_id=order_id, done=done)))

    def trouble(self, order_id: str, reason: str) -> None:
        self._tell(pb.DeviceMessage(trouble=pb.Trouble(order_id=order_id, reason=reason[:500])))

    async def decline(self, reason: str) -> None:
        """The last word on the stream: the server answers it by ending the stream, so that it has been heard by then."""
        self._tell(pb.DeviceMessage(trouble=pb.Trouble(reason=reason[:500])))
        self._tell(None)
        with contextlib.suppress(TimeoutError):
            async with aio.timeout(LAST_WORD_S):
                await self._over.wait()

    def _tell(self, message: pb.DeviceMessage | None) -> None:
        if self.open.is_set():
            with contextlib.suppress(asyncio.QueueFull):
                self._outbox.put_nowait(message)

    # --- bulk

    async def read(self, digest: str, offset: int, take: Callable[[bytes], None]) -> None:
        download = self._wire.channel.unary_stream(
            "/attune.v1.Blobs/Download", request_serializer=pb.DownloadRequest.SerializeToString, response_deserializer=None
        )
        request = pb.DownloadRequest(digest=digest, offset=offset)
        with self._pulse.transfer(), self._wire.call(download(request)) as call:
            while True:
                async with aio.timeout(self.stall_s):
                    frame = await call.read()
                if frame is grpc.aio.EOF:
                    return
                self._pulse.heard()
                take(frame)
                await self._allowance.spend(len(frame))

    async def upload_offset(self, target: UploadTarget) -> int:
        with self._wire.call(_blobs(self._wire.channel).UploadOffset(target_message(target), timeout=self.stall_s)) as call:
            reply: pb.UploadOffsetReply = await call
        return int(reply.offset)

    async def upload(self, target: UploadTarget, frames: Iterator[bytes]) -> None:
        upload = self._wire.channel.stream_unary(
            "/attune.v1.Blobs/Upload", request_serializer=None, response_deserializer=pb.UploadReply.FromString
        )
        metadata = ((UPLOAD_KEY, target_message(target).SerializeToString()),)
        with self._pulse.transfer(), self._wire.call(upload(metadata=metadata)) as call:
            # Where the server has answered before the end, its answer says why.
            with contextlib.suppress(asyncio.InvalidStateError):
                for frame in frames:
                    async with aio.timeout(self.stall_s):
                        await call.write(frame)
                    self._pulse.heard()  # there was room in the window, which the server opens
                    await self._allowance.spend(len(frame))
                await call.done_writing()
            async with aio.timeout(self.stall_s):
                reply = await call
        if reply.received < target.size:
            raise Broken(f"the server has {reply.received} of {target.size} bytes")

    async def submit(self, update: Update) -> bool:
        with self._wire.call(_federation(self._wire.channel).Submit(update_message(update), timeout=self.stall_s)) as call:
            receipt: pb.Receipt = await call
        if receipt.status == pb.Receipt.STATUS_UNSPECIFIED:
            raise AttuneError(f"the server answered an update with a receipt of no known kind: {receipt.message}")
        return bool(receipt.status == pb.Receipt.STATUS_ACCEPTED)


async def _speak(call: Any, outbox: asyncio.Queue[pb.DeviceMessage | None]) -> None:
    """Says what is in the outbox until the stream ends, which whoever reads it hears as well. None: nothing more is said."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while (message := await outbox.get()) is not None:
            await call.write(message)
        await call.done_writing()
