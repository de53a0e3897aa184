"""A scripted server for tests: within the process, and over real gRPC with mutual TLS."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from attune.common.errors import AttuneError, UnknownBlob
from attune.common.exchange import protobuf as exchange
from attune.common.exchange.messages import Hello, ToDevice, Update, UploadTarget, Welcome
from attune.common.grpc_errors import abort
from attune.common.identity.credential import Credential, csr_der, new_key
from attune.common.pb import federation_pb2 as pb
from attune.common.pb.federation_pb2_grpc import FederationServicer, add_FederationServicer_to_server
from attune.common.wire.digest import digest_of
from attune.fedclient.address import ServerAddress
from attune.fedclient.home import Identity
from attune.fedclient.link.grpc_link import GrpcLink
from attune.fedserver.identity.authority import Authority
from attune.fedserver.identity.server_tls import LiveServerCredentials, server_options

FRAME = 1000
CUT = ConnectionResetError("the cable was pulled")


class Stream:
    def __init__(self) -> None:
        self.unsent: asyncio.Queue[ToDevice | Exception | None] = asyncio.Queue()
        self.closed = asyncio.Event()

    async def next(self) -> ToDevice | None:
        said = await self.unsent.get()
        if isinstance(said, Exception):
            raise said
        return said


@dataclass
class Scripted:
    """Server in the place of an InProcessServer. Its faults are lists, an entry a call; a number cuts after that many bytes."""

    downloads_fail: list[int | AttuneError] = field(default_factory=list)
    uploads_fail: list[int | AttuneError] = field(default_factory=list)
    submits_fail: list[AttuneError | ConnectionError] = field(default_factory=list)
    late: bool = False
    offered: dict[str, bytes] = field(default_factory=dict)
    here: dict[str, bytearray] = field(default_factory=dict)  # uploaded bytes, by digest
    streams: list[Stream] = field(default_factory=list)
    hellos: list[tuple[str, Hello]] = field(default_factory=list)
    said: list[tuple[str, object]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # offsets at which uploads began
    submits: list[Update] = field(default_factory=list)
    says: dict[str, Any] = field(default_factory=dict)  # abilities of the server, in Welcome over the network
    stuck: asyncio.Event | None = None  # set when a call has begun that waits for ever

    def offer(self, data: bytes) -> str:
        self.offered[digest_of(data)] = data
        return digest_of(data)

    async def connect(self, name: str, hello: Hello) -> Stream:
        self.hellos.append((name, hello))
        self.streams.append(Stream())
        return self.streams[-1]

    def disconnect(self, name: str, stream: Stream) -> None:
        stream.closed.set()

    async def progress(self, name: str, order_id: str, done: float) -> None:
        self.said.append((order_id, done))

    async def trouble(self, name: str, order_id: str, reason: str) -> None:
        self.said.append((order_id, reason))

    async def download(self, name: str, digest: str, offset: int) -> AsyncIterator[bytes]:
        if digest not in self.offered:
            raise UnknownBlob(f"{name} was not offered {digest}")
        fault = self.downloads_fail.pop(0) if self.downloads_fail else None
        if isinstance(fault, AttuneError):
            raise fault
        data = self.offered[digest][offset:fault]
        for at in range(0, len(data), FRAME):
            yield data[at : at + FRAME]
        await self._wait()
        if fault is not None:
            raise CUT

    async def upload_offset(self, name: str, target: UploadTarget) -> int:
        return len(self.here.get(target.digest, b""))

    async def upload(self, name: str, target: UploadTarget, frames: Iterator[bytes]) -> int:
        whole = self.begin(target)
        for frame in frames:
            self.take(whole, frame)
        return await self.end(target, whole)

    def begin(self, target: UploadTarget) -> bytearray:
        self.offsets.append(target.offset)
        whole = self.here.setdefault(target.digest, bytearray())
        del whole[target.offset :]
        return whole

    def take(self, whole: bytearray, frame: bytes) -> None:
        whole += frame
        if self.uploads_fail and isinstance(limit := self.uploads_fail[0], int):
            self.uploads_fail.pop(0)
            del whole[limit:]
            raise CUT

    async def end(self, target: UploadTarget, whole: bytearray) -> int:
        await self._wait()
        if self.uploads_fail and isinstance(self.uploads_fail[0], AttuneError):
            raise self.uploads_fail.pop(0)
        assert digest_of(bytes(whole)) == target.digest
        return len(whole)

    async def submit(self, name: str, update: Update) -> bool:
        await self._wait()
        if self.submits_fail:
            raise self.submits_fail.pop(0)
        # As a server does that waits for uploads.
        while any(len(self.here[part.digest]) < part.size for part in update.parts if part.digest in self.here):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        self.submits.append(update)
        return not self.late

    async def _wait(self) -> None:
        if self.stuck is not None:
            self.stuck.set()
            await asyncio.Event().wait()


class OverGrpc(FederationServicer):
    """The scripted server behind a port. It sets a pace with `every_s`, and can fall silent."""

    def __init__(self, scripted: Scripted, folder: Path, every_s: float = 0.0) -> None:
        self.scripted, self.every_s, self.beats, self.peers = scripted, every_s, 0, []
        self.silent = False
        self.paces = list[float]()  # of the device's beats
        self.authority = Authority.create(folder)
        self._server = grpc.aio.server(options=server_options())
        add_FederationServicer_to_server(self, self._server)
        handlers = {
            "Download": grpc.unary_stream_rpc_method_handler(self._download, pb.DownloadRequest.FromString, None),
            "Upload": grpc.stream_unary_rpc_method_handler(self._upload, None, pb.UploadReply.SerializeToString),
            "UploadOffset": grpc.unary_unary_rpc_method_handler(
                self._offset, pb.UploadTarget.FromString, pb.UploadOffsetReply.SerializeToString
            ),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("attune.v1.Blobs", handlers),))

    async def start(self, port: int = 0) -> GrpcLink:
        tls = LiveServerCredentials([self.authority.certificate_pem], self.authority.issue_server())
        port = self._server.add_secure_port(f"127.0.0.1:{port}", tls.credentials)
        await self._server.start()
        return self.link(port)

    def link(self, port: int) -> GrpcLink:
        key = new_key()
        credential = Credential(key, self.authority.issue_device(csr_der(key, "kiel"), "kiel", 30.0))
        identity = Identity("kiel", credential, self.authority.certificate_pem)
        return GrpcLink(ServerAddress("127.0.0.1", port), identity, lambda renewed: None)

    async def stop(self) -> None:
        await self._server.stop(None)

    async def Connect(self, requests: Any, context: Any) -> None:
        hello = exchange.TO_SERVER.read((await context.read()).SerializeToString())
        assert isinstance(hello, Hello)
        self.peers.append(context.peer())
        stream = await self.scripted.connect("kiel", hello)
        if self.every_s:
            await context.write(pb.ServerMessage(beat=pb.Beat(every_s=self.every_s)))
        listening = asyncio.create_task(self._listen(context))
        beating = asyncio.create_task(self._beat(context))
        try:
            while (event := await stream.next()) is not None:
                await context.write(_message(event, self.scripted.says))
        except (AttuneError, ConnectionError) as error:
            await _end(context, error)
        finally:
            listening.cancel()
            beating.cancel()
            self.scripted.disconnect("kiel", stream)

    async def _beat(self, context: Any) -> None:
        while self.every_s:
            await asyncio.sleep(self.every_s / 2)
            if not self.silent:
                await context.write(pb.ServerMessage(beat=pb.Beat(every_s=self.every_s)))

    async def _listen(self, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            match message.WhichOneof("message"):
                case "progress":
                    await self.scripted.progress("kiel", message.progress.order_id, message.progress.done)
                case "trouble":
                    await self.scripted.trouble("kiel", message.trouble.order_id, message.trouble.reason)
                case "beat":
                    self.beats += 1
                    self.paces.append(message.beat.every_s)

    async def _download(self, request: pb.DownloadRequest, context: Any) -> None:
        try:
            async for frame in self.scripted.download("kiel", request.digest, request.offset):
                await context.write(frame)
        except (AttuneError, ConnectionError) as error:
            await _end(context, error)

    async def _upload(self, frames: Any, context: Any) -> pb.UploadReply:
        sent = pb.UploadTarget.FromString(dict(context.invocation_metadata())["attune-upload-bin"])
        target = exchange.TARGET.read(sent.SerializeToString())
        try:
            whole = self.scripted.begin(target)
            while (frame := await context.read()) is not grpc.aio.EOF:
                self.scripted.take(whole, frame)
            return pb.UploadReply(received=await self.scripted.end(target, whole))
        except (AttuneError, ConnectionError) as error:
            await _end(context, error)
            raise

    async def _offset(self, sent: pb.UploadTarget, context: Any) -> pb.UploadOffsetReply:
        target = exchange.TARGET.read(sent.SerializeToString())
        return pb.UploadOffsetReply(offset=await self.scripted.upload_offset("kiel", target))

    async def Submit(self, sent: pb.Update, context: Any) -> pb.Receipt:
        update = exchange.UPDATE.read(sent.SerializeToString())
        try:
            in_time = await self.scripted.submit("kiel", update)
        except (AttuneError, ConnectionError) as error:
            await _end(context, error)
        return pb.Receipt(status=pb.Receipt.STATUS_ACCEPTED if in_time else pb.Receipt.STATUS_LATE)


async def _end(context: Any, error: Exception) -> None:
    if isinstance(error, AttuneError):
        await abort(context, error)
    await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))


def _message(said: ToDevice, says: dict[str, Any]) -> pb.ServerMessage:
    """Return a message for the device. `says` has the server's abilities, for its welcome."""
    message = pb.ServerMessage.FromString(exchange.TO_DEVICE.write(said))
    for name, value in says.items() if isinstance(said, Welcome) else ():
        setattr(message.welcome, name, value)
    return message
