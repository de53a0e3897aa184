"""Direct transfers with a store that lies, fails or is slow: only checked bytes count, and no object is left behind."""

import asyncio
import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from attune.common import aio
from attune.common.errors import CertificateRefused, LedgerBusy, LimitExceeded, OrderClosed
from attune.common.exchange.messages import DirectUpload, SignedUrl, UploadTarget
from attune.common.protocol import DIRECT_PART_BYTES
from attune.common.wire.blobs import Blob
from attune.common.wire.digest import digest_of
from attune.common.wire.malformed import DigestMismatch, Truncated
from attune.features.remote import direct_transfers
from attune.features.remote.direct_transfers import DirectObject, DirectTransfers
from attune.fedserver.core.messages import OrderId
from attune.fedserver.core.orderbook import OrderBook
from attune.fedserver.federation.streams import RevokedDevices
from attune.fedserver.federation.updates import PendingUploads
from attune.fedserver.stores.disk import DiskStorage
from attune.fedserver.stores.uploads import Sink, Uploads

DATA = b"\1" * DIRECT_PART_BYTES + b"\2" * 100
DIGESTS = (hashlib.sha256(b"\1" * DIRECT_PART_BYTES).digest(), hashlib.sha256(b"\2" * 100).digest())
ASKED = DirectUpload(UploadTarget("train-1-kiel", "shared", digest_of(DATA), len(DATA)), DIGESTS)


class Store:
    """A store in memory that gives back whatever a test puts into `content`."""

    address = "https://s3.example"

    def __init__(self) -> None:
        self.content, self.parts, self.done = DATA, set[int](), list[str]()
        self.failing, self.held = 0, dict[str, str]()
        self.gone = threading.Event()

    def download_url(self, blob: Blob) -> str:
        return f"{self.address}/{blob.name}"

    def begin(self, digest: str) -> DirectObject:
        self.done.append("begun")
        return DirectObject("key", f"upload-{len(self.done)}")

    def arrived(self, begun: DirectObject) -> set[int]:
        return self.parts

    def part_url(self, begun: DirectObject, number: int, size: int, digest: bytes) -> str:
        assert digest == DIGESTS[number - 1]
        return f"{self.address}/{number}/{size}"

    def complete(self, begun: DirectObject, digests: tuple[bytes, ...]) -> None:
        self.done.append("complete")

    def pieces(self, begun: DirectObject) -> Iterator[memoryview]:
        for at in range(0, len(self.content), 1 << 20):
            if self.failing and at >= 3 << 20:
                self.failing -= 1
                raise LedgerBusy("the store hung up")
            yield memoryview(self.content)[at : at + (1 << 20)]

    def hold(self, blob: Blob, begun: DirectObject) -> None:
        self.held[blob.name] = begun.key

    def release(self, blob: Blob) -> None:
        self.done.append("released")

    def abandon(self, begun: DirectObject) -> None:
        self.done.append("abandoned")
        self.gone.set()


class Intake:
    """The intake of updates, with real uploads in a folder."""

    def __init__(self, folder: Path, book: OrderBook) -> None:
        self.uploads, self._book = Uploads(DiskStorage(folder)), book
        self.revoked, self.pending_uploads = RevokedDevices(), PendingUploads()

    def check(self, name: str, target: UploadTarget) -> int:
        self._book.order(name, target.order_id)
        return len(DATA)

    def offset(self, name: str, target: UploadTarget) -> int:
        return self.uploads.offset(name, target)

    async def open(self, name: str, target: UploadTarget) -> Sink:
        self.revoked.check(name)
        return self.uploads.sink(name, target, len(DATA))

    async def write(self, name: str, target: UploadTarget, sink: Sink, frames: list[bytes]) -> None:
        self.uploads.write(name, target.part, sink, frames)

    async def complete(self, name: str, target: UploadTarget, sink: Sink) -> Blob:
        return self.uploads.complete(name, target.part, sink)


class Scene:
    def __init__(self, folder: Path) -> None:
        self.book, self.store = OrderBook(), Store()
        self.book.write(OrderId("train", 1, "kiel"), {}, {"shared": ""}, 60.0, 0)
        self.intake = Intake(folder, self.book)
        self.direct = DirectTransfers(self.store, self.book, self.intake)  # type: ignore[arg-type]

    async def ask(self, asked: DirectUpload = ASKED) -> SignedUrl:
        return await self.direct.upload_url("kiel", asked)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


async def test_parts_are_asked_for_in_turn_and_the_whole_is_read_back_once(scene: Scene) -> None:
    first = await scene.ask()
    assert (first.url, first.offset) == (f"https://s3.example/1/{DIRECT_PART_BYTES}", 0)
    scene.store.parts = {1}
    second = await scene.ask()
    assert (second.url, second.offset) == ("https://s3.example/2/100", DIRECT_PART_BYTES)
    scene.store.parts = {1, 2}
    assert await asyncio.gather(scene.ask(), scene.ask()) == [SignedUrl(offset=len(DATA))] * 2
    assert scene.store.done == ["begun", "complete"]
    blob = scene.intake.uploads.take("kiel", "shared", ASKED.target.digest)
    assert scene.store.held == {blob.name: "key"}


def test_bytes_that_a_killed_server_left_unchecked_are_checked(scene: Scene) -> None:
    """Write all bytes, but let the process end before it has checked them."""
    sink = scene.intake.uploads.sink("kiel", ASKED.target, len(DATA))
    scene.intake.uploads.write("kiel", "shared", sink, [DATA])
    sink.close()
    assert aio.run(scene.ask()) == SignedUrl(offset=len(DATA))
    assert scene.intake.uploads.take("kiel", "shared", ASKED.target.digest).size == len(DATA)
    assert scene.store.done == []


async def test_a_second_question_does_not_cut_off_the_first_ones_reading(scene: Scene) -> None:
    scene.store.parts = {1, 2}
    checked, are_all_here, go_on = scene.intake.complete, asyncio.Event(), asyncio.Event()

    async def slow(name: str, target: UploadTarget, sink: Sink) -> Blob:
        are_all_here.set()
        await go_on.wait()
        return await checked(name, target, sink)

    scene.intake.complete = slow  # type: ignore[method-assign]
    first = asyncio.create_task(scene.ask())
    await are_all_here.wait()
    first.cancel()
    second = asyncio.create_task(scene.ask())
    await asyncio.sleep(0.05)
    assert not second.done()
    go_on.set()
    assert await second == SignedUrl(offset=len(DATA))
    assert scene.store.done == ["begun", "complete"] and len(scene.store.held) == 1


@pytest.mark.parametrize(
    ("content", "error"),
    [(DATA[:-1] + b"\3", DigestMismatch), (DATA + b"\3", LimitExceeded), (DATA[:-1], Truncated)],
)
def test_other_bytes_than_announced_are_refused_and_removed(scene: Scene, content: bytes, error: type[Exception]) -> None:
    """Let a store take what the signatures forbid."""
    scene.store.content, scene.store.parts = content, {1, 2}
    with pytest.raises(error):
        aio.run(scene.ask())
    assert scene.store.done == ["begun", "complete", "abandoned"]
    assert scene.store.held == {}


async def test_a_store_that_fails_while_it_is_read_is_read_again(scene: Scene) -> None:
    scene.store.failing, scene.store.parts = 1, {1, 2}
    with pytest.raises(LedgerBusy):
        await scene.ask()
    assert await scene.ask() == SignedUrl(offset=len(DATA))
    assert scene.store.done == ["begun", "complete"]


@pytest.mark.parametrize("end", ["closed", "revoked"])
async def test_what_is_begun_is_given_up_with_the_order_or_the_device(scene: Scene, end: str, monkeypatch) -> None:
    monkeypatch.setattr(direct_transfers, "LOOK_S", 0.01)
    watching = asyncio.create_task(scene.direct.watch())
    await scene.ask()
    if end == "closed":
        scene.book.write(OrderId("train", 2, "kiel"), {}, {"shared": ""}, 60.0, 1)
    else:
        scene.intake.revoked.add("kiel", CertificateRefused("revoked"))
    assert await asyncio.to_thread(scene.store.gone.wait, 30)
    with pytest.raises(OrderClosed if end == "closed" else CertificateRefused):
        await scene.ask()
    watching.cancel()
    assert scene.store.done == ["begun", "abandoned"]


async def test_a_server_that_ends_gives_up_what_is_begun(scene: Scene) -> None:
    await scene.ask()
    await scene.direct.close()
    assert scene.store.done == ["begun", "abandoned"]
