"""A small server that speaks the whole contract over real mutual TLS and can fail on demand, and shards to train on."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np
import pytest

from attune.common import aio
from attune.common.config import TrainSettings
from attune.common.errors import AttuneError, NameTaken, Replaced, TokenRefused, UpdateRefused
from attune.common.grpc_errors import abort
from attune.common.identity.credential import fingerprint_of, key_fingerprint_of
from attune.common.identity.token import JoinToken
from attune.common.pb import federation_pb2 as pb
from attune.common.pb.federation_pb2_grpc import FederationServicer, add_FederationServicer_to_server
from attune.common.plan import ModelSpec, Plan, Profile
from attune.fedclient import client
from attune.fedclient.address import ServerAddress
from attune.fedclient.console import Console
from attune.fedclient.home import DeviceHome
from attune.fedclient.options import DeviceOptions
from attune.fedserver.identity.authority import Authority
from attune.fedserver.identity.server_tls import LiveServerCredentials, peer_fingerprint
from attune.fedserver.stores.disk import DiskStorage
from attune.fedserver.stores.uploads import Sink

PLAN_SEED = 5


@dataclass
class Faults:
    """Faults of the server, once each unless said otherwise."""

    break_stream_after_order: int | None = None  # index of the order after whose sending the stream is cut
    break_upload_at: float | None = None  # share of a blob after which the upload is cut
    no_renewals: bool = False
    replaced: bool = False  # every stream is closed for a newer one
    no_uploads: bool = False  # all uploads fail, until unset
    refuse_updates: int = 0  # number of submits that are refused by name
    lose_receipts: int = 0  # number of submits that are accepted, but whose answer is lost
    damage_downloads: int = 0  # number of downloads with a flipped byte
    break_download_at: int | None = None  # bytes after which a download is cut


@dataclass
class Seen:
    hellos: list[pb.Hello] = field(default_factory=list)
    enrolled: list[str] = field(default_factory=list)
    downloads: list[tuple[str, int]] = field(default_factory=list)  # digest, offset
    uploads: list[tuple[str, int]] = field(default_factory=list)  # order, offset
    submits: list[pb.Update] = field(default_factory=list)
    troubles: list[pb.Trouble] = field(default_factory=list)
    progress: list[pb.Progress] = field(default_factory=list)
    orders_sent: list[str] = field(default_factory=list)
    streams: list[tuple[str, str]] = field(default_factory=list)  # certificate, address of the connection
    blobs: dict[str, dict[str, bytes]] = field(default_factory=dict)  # bytes handed in, by order and part


class FakeServer(FederationServicer):
    """Server with two TRAIN orders and one EVALUATE for one device, then Finish; each order serves the last result."""

    def __init__(self, folder: Path, method: str = "fedavg", model: str = "mlr", **options: Any) -> None:
        self.folder, self.method, self.model, self.options = folder, method, model, options
        self.authority = Authority.create(folder / "authority")
        self.train = TrainSettings(lr=0.1, momentum=0.5, batch_size=16, local_epochs=2)
        self.model_options: dict[str, Any] = {}
        self.faults, self.seen = Faults(), Seen()
        self.works = ["train", "train", "evaluate"]
        self.rounds = [1, 2, 2]
        self.deadline_s = 60.0
        self.at = 0
        self.plan: Plan | None = None
        self.serving: dict[str, dict[str, Any]] = {}  # tensors by part
        self.offered: dict[str, bytes] = {}  # bytes by digest
        self.names: dict[str, str] = {}  # names by certificate
        self.keys: dict[str, str] = {}  # keys by name
        self.tokens: dict[str, float] = {}  # expiry by bootstrap certificate
        self.roots = [self.authority.certificate_pem]
        self.streams: list[asyncio.Queue[pb.ServerMessage | None]] = []
        self.stream_of: dict[str, asyncio.Queue[pb.ServerMessage | None]] = {}  # newest stream of each device
        self.port = 0
        self._ready = threading.Event()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    # --- life

    def start(self) -> FakeServer:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(0), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self._listen())
        self._ready.set()
        self.loop.run_forever()

    async def _listen(self) -> None:
        self.tls = LiveServerCredentials(self.roots, self.authority.issue_server())
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        add_FederationServicer_to_server(self, self._server)
        handlers = {
            "Download": grpc.unary_stream_rpc_method_handler(self._download, pb.DownloadRequest.FromString, None),
            "Upload": grpc.stream_unary_rpc_method_handler(self._upload, None, pb.UploadReply.SerializeToString),
            "UploadOffset": grpc.unary_unary_rpc_method_handler(
                self._upload_offset, pb.UploadTarget.FromString, pb.UploadOffsetReply.SerializeToString
            ),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("attune.v1.Blobs", handlers),))
        self.port = self._server.add_secure_port(f"127.0.0.1:{self.port}", self.tls.credentials)
        await self._server.start()

    def token(self, ttl_s: float = 3600.0) -> str:
        token = JoinToken.new(self.authority.public_key_compressed)
        pem = token.bootstrap().certificate_pem
        self.tokens[fingerprint_of(pem)] = time.time() + ttl_s
        self.roots.append(pem)
        self.tls.update(self.roots, self.authority.issue_server())
        return token.encode()

    # --- federation

    async def Enrol(self, request: pb.EnrolRequest, context: Any) -> pb.Certificate:
        if self.tokens[peer_fingerprint(context.auth_context())] < time.time():
            await abort(context, TokenRefused("this token has expired"))
        pem = self.authority.issue_device(request.csr_der, request.name, 1.0)
        if self.keys.setdefault(request.name, key_fingerprint_of(pem)) != key_fingerprint_of(pem):
            await abort(context, NameTaken(f"another key holds {request.name}"))
        self.names[fingerprint_of(pem)] = request.name
        self.seen.enrolled.append(request.name)
        return pb.Certificate(certificate_pem=pem, ca_pem=self.authority.certificate_pem, name=request.name)

    async def Renew(self, request: pb.RenewRequest, context: Any) -> pb.Certificate:
        if self.faults.no_renewals:
            await context.abort(grpc.StatusCode.INTERNAL, "a bug")
        name = self.names[peer_fingerprint(context.auth_context())]
        pem = self.authority.issue_device(request.csr_der, name, 1.0)
        self.names[fingerprint_of(pem)] = name
        return pb.Certificate(certificate_pem=pem, ca_pem=self.authority.certificate_pem, name=name)

    async def Connect(self, requests: AsyncIterator[pb.DeviceMessage], context: Any) -> AsyncIterator[pb.ServerMessage]:
        hello = (await anext(aiter(requests))).hello
        self.seen.hellos.append(hello)
        self.seen.streams.append((peer_fingerprint(context.auth_context()), context.peer()))
        if self.faults.replaced:
            await abort(context, Replaced("kiel opened a newer stream"))
        if self.plan is None:
            self._make_plan(msgspec.json.decode(hello.profile_json, type=Profile))
        outbox: asyncio.Queue[pb.ServerMessage | None] = asyncio.Queue()
        self.streams.append(outbox)
        name = self.names[peer_fingerprint(context.auth_context())]
        self.stream_of[name] = outbox
        reader = asyncio.create_task(self._listen_to(requests))
        yield pb.ServerMessage(notice=pb.Notice(text="hello from the fake"))
        yield pb.ServerMessage(welcome=pb.Welcome(plan_json=msgspec.json.encode(self.plan)))
        await self.push_current(outbox, name)
        while (message := await outbox.get()) is not None:
            index = self.at
            yield message
            if message.HasField("order") and self.faults.break_stream_after_order == index:
                self.faults.break_stream_after_order = None
                reader.cancel()
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the link is cut")
        reader.cancel()

    async def _listen_to(self, requests: AsyncIterator[pb.DeviceMessage]) -> None:
        with contextlib.suppress(grpc.aio.BaseError):  # this server is stopped while it listens
            async for message in requests:
                if message.HasField("progress"):
                    self.seen.progress.append(message.progress)
                if message.HasField("trouble"):
                    self.seen.troubles.append(message.trouble)
                    self.at += 1
                    await self.push_current(self.streams[-1], message.trouble.order_id.split("-", 2)[2])

    async def push_current(self, outbox: asyncio.Queue[pb.ServerMessage | None], name: str) -> None:
        if self.at >= len(self.works):
            await outbox.put(pb.ServerMessage(finish=pb.Finish(message="all rounds are over")))
            return
        work, round_ = self.works[self.at], self.rounds[self.at]
        order = pb.Order(id=f"{work}-{round_}-{name}", round=round_, deadline_s=self.deadline_s)
        order.work = pb.WORK_TRAIN if work == "train" else pb.WORK_EVALUATE
        for part, tensors in self.serving.items():
            order.downloads.append(self._offer(part, tensors))
        order.returns.extend(pb.Return(part=part) for part in (self.serving if work == "train" else ()))
        self.seen.orders_sent.append(order.id)
        await outbox.put(pb.ServerMessage(order=order))

    async def Submit(self, update: pb.Update, context: Any) -> pb.Receipt:
        if self.faults.refuse_updates:
            self.faults.refuse_updates -= 1
            self.at += 1
            name = self.names[peer_fingerprint(context.auth_context())]
            self.loop.call_later(0.1, lambda: self.loop.create_task(self.push_current(self.streams[-1], name)))
            await abort(context, UpdateRefused("the norm is too large"))
        first = all(update.order_id != other.order_id for other in self.seen.submits)
        self.seen.submits.append(update)
        if first and self.at < len(self.works):
            if self.works[self.at] == "train":
                self._take(update)
            self.at += 1
        if self.faults.lose_receipts:
            self.faults.lose_receipts -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the receipt is lost")
        name = self.names[peer_fingerprint(context.auth_context())]
        await self.push_current(self.stream_of[name], name)
        return pb.Receipt(status=pb.Receipt.STATUS_ACCEPTED)

    def _take(self, update: pb.Update) -> None:
        from attune.common.wire.files import read_tensors

        for ref in update.parts:
            path = self._path(ref.digest)
            self.seen.blobs.setdefault(update.order_id, {})[ref.part] = path.read_bytes()
            returned = read_tensors(path)
            served = self.serving[ref.part]
            change = ref.part == "generated"
            self.serving[ref.part] = {name: served[name] + value if change else value for name, value in returned.items()}

    def _make_plan(self, profile: Profile) -> None:
        from attune.common.methods.method import assign
        from attune.common.methods.registry import get
        from attune.common.models.registry import build, default_spec
        from attune.common.models.structure import tensors_of

        if ":" in self.model:
            spec = ModelSpec(self.model, profile.kind, profile.shape, len(profile.labels))
        else:
            spec = default_spec(profile.kind, profile.shape, len(profile.labels), 0, self.model, self.model_options)
        federation = self.authority.fingerprint
        self.plan = Plan(federation, PLAN_SEED, spec, list(profile.labels), self.method, self.options, self.train)
        model = build(spec, PLAN_SEED)
        tensors = tensors_of(model)
        for name, kind in assign(get(self.method), model).items():
            if kind != "private":
                self.serving.setdefault(kind, {})[name] = tensors[name].clone()

    # --- blobs

    def _path(self, digest: str) -> Path:
        return self.folder / f"{digest}.safetensors"

    def _offer(self, part: str, tensors: dict[str, Any]) -> pb.BlobRef:
        from attune.common.wire.files import write_tensors

        path = self.folder / "offer.safetensors"
        blob = write_tensors(path, tensors)
        self.offered[blob.digest] = path.read_bytes()
        return pb.BlobRef(part=part, digest=blob.digest, size=blob.size)

    async def _download(self, request: pb.DownloadRequest, context: Any) -> AsyncIterator[bytes]:
        self.seen.downloads.append((request.digest, request.offset))
        data = self.offered[request.digest][request.offset :]
        if self.faults.damage_downloads:
            self.faults.damage_downloads -= 1
            data = data[:-1] + bytes([data[-1] ^ 1])
        if (limit := self.faults.break_download_at) is not None:
            self.faults.break_download_at = None
            yield data[:limit]
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the link is cut")
        for at in range(0, len(data), 1000):
            yield data[at : at + 1000]

    async def _upload(self, frames: AsyncIterator[bytes], context: Any) -> pb.UploadReply:
        metadata = dict(context.invocation_metadata())
        target = pb.UploadTarget.FromString(metadata["attune-upload-bin"])
        self.seen.uploads.append((target.order_id, target.offset))
        if self.faults.no_uploads:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        with closing(Sink(DiskStorage(self.folder).spool, "peer", target.size, target.digest)) as sink:
            skip = sink.offset - target.offset
            async for frame in frames:
                if (share := self.faults.break_upload_at) is not None:
                    self.faults.break_upload_at = None
                    sink.write([frame[: int(target.size * share)]])
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the link is cut")
                sink.write([frame[skip:]])
                skip = max(0, skip - len(frame))
            (self.folder / sink.finish().name).rename(self._path(target.digest))
        return pb.UploadReply(received=target.size)

    async def _upload_offset(self, target: pb.UploadTarget, context: Any) -> pb.UploadOffsetReply:
        path = self._path(target.digest)
        here = path.stat().st_size if path.exists() else DiskStorage(self.folder).spool.offset("peer", target.digest)
        return pb.UploadOffsetReply(offset=here)


class Lines(Console):
    """Console that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@dataclass
class Bench:
    """Folder with a shard, a server, and devices that run in this process."""

    folder: Path
    server: FakeServer
    shard: Path
    lines: Lines = field(default_factory=Lines)

    def options(self, **changed: Any) -> DeviceOptions:
        usual: dict[str, Any] = {
            "data": self.shard,
            "server": ServerAddress("127.0.0.1", self.server.port),
            "home": self.folder / "home",
            "name": "kiel",
            "device": "cpu",
            "connect_timeout_s": 20.0,
        }
        if "token" not in changed:
            usual["token"] = self.server.token()
        return DeviceOptions(**(usual | changed))

    def run(self, **changed: Any) -> Path:
        return client.run(self.options(**changed), self.lines)

    def run_until(self, happened: Callable[[], bool], **changed: Any) -> None:
        """Start a device, and cut it off, as a kill would, once `happened`."""
        options = self.options(**changed)

        async def scenario() -> None:
            from attune.fedclient.data.lazy_shard import LazyShard
            from attune.fedclient.data.shard import load_shard
            from attune.fedclient.work.worker import Worker

            home = DeviceHome(self.folder / "home")
            shard = LazyShard.in_memory(load_shard(options.data))
            with home.locked(), Worker() as worker:
                task = asyncio.create_task(client.live(options, shard, home, self.lines, worker))
                async with aio.timeout(20):
                    while not happened():
                        assert not task.done(), task.result()
                        await asyncio.sleep(0.01)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

        aio.run(scenario())


def tabular_shard(folder: Path, samples: int = 40, features: int = 6, seed: int = 3) -> Path:
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(3, features)) * 3
    y = rng.integers(0, 3, size=samples + 20)
    x = (centres[y] + rng.normal(size=(samples + 20, features))).astype(np.float32)
    folder.mkdir(parents=True)
    names = np.array(["ant", "bee", "cow"])
    np.savez(folder / "train.npz", x=x[:samples], y=names[y[:samples]])
    np.savez(folder / "test.npz", x=x[samples:], y=names[y[samples:]])
    (folder / "meta.json").write_text('{"classes": ["ant", "bee", "cow"]}')
    return folder


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path / "attune"))


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    return tabular_shard(tmp_path / "shard3")


@pytest.fixture
def make_bench(tmp_path: Path, shard: Path) -> Iterator[Callable[..., Bench]]:
    servers: list[FakeServer] = []

    def make(kind: type[FakeServer] = FakeServer, **options: Any) -> Bench:
        server = kind(tmp_path / f"server{len(servers)}", **options)
        servers.append(server.start())
        return Bench(tmp_path, server, shard)

    yield make
    for server in servers:
        server.stop()


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    return make_bench()


def error_of(call: Callable[[], Any]) -> AttuneError:
    with pytest.raises(AttuneError) as caught:
        call()
    return caught.value
