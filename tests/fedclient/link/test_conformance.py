"""Requirements of every link: ordered events, bytes from any offset, the server's errors by name, and real cancellation."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from attune.common.errors import (
    AttuneError,
    DiskFull,
    LimitExceeded,
    OrderClosed,
    Replaced,
    Stalled,
    UnknownBlob,
    Unreachable,
    UpdateRefused,
    UploadTakenOver,
)
from attune.common.exchange.messages import BlobRef, Farewell, Hello, Notice, Order, Update, UploadTarget, Welcome
from attune.common.metrics import Metrics
from attune.common.plan import Profile
from attune.common.wire.digest import digest_of
from attune.common.wire.malformed import DigestMismatch
from attune.fedclient.link.port import Broken, Link
from attune.fedclient.messages import Event, StreamOpened
from tests.fedclient.link.server import CUT

PROFILE = Profile(kind="tabular", shape=(3,), labels=[0, 1], samples=20, test_samples=5)
HELLO = Hello("attune 0", msgspec.json.encode(PROFILE))
DATA = os.urandom(50_000)
TARGET = UploadTarget("train-1-kiel", "shared", digest_of(DATA), len(DATA))
UPDATE = Update(
    "train-1-kiel",
    (BlobRef("shared", TARGET.digest, len(DATA), 3, "bf16"),),
    20,
    msgspec.json.encode(Metrics(loss=0.5, test_samples=5)),
)
SERVED = BlobRef("shared", "sha256:ab", 10, 2, data=b"ten bytes!")
ORDER = Order(
    "train-1-kiel", 1, "train", (SERVED,), ("shared",), (), ("shared", "private"), deadline_s=60.0,
    encodings={"shared": "bf16"}, prior={"common": 0.75, "local": 0.25},
)  # fmt: skip


@contextlib.asynccontextmanager
async def stream(link: Link) -> AsyncIterator[tuple[list[Event], asyncio.Task[None]]]:
    """Open a control stream. Return its events so far, and the task that ends with it."""
    heard: list[Event] = []

    async def handle(event: Event) -> None:
        heard.append(event)

    task = asyncio.create_task(link.control(HELLO, handle))
    try:
        await asyncio.wait([task, asyncio.create_task(link.open.wait())], return_when=asyncio.FIRST_COMPLETED)
        yield heard, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(happened: Callable[[], Any]) -> None:
    while not happened():  # noqa: ASYNC110 (what happens is the fake server's, which has no event for each)
        await asyncio.sleep(0.005)


def frames(data: bytes) -> Any:
    return iter([data[at : at + 7000] for at in range(0, len(data), 7000)])


async def test_events_come_in_order_and_the_end_of_the_stream_is_a_break(linked):
    said = [Welcome(b"plan"), Notice("welcome"), ORDER, Farewell("over")]
    async with linked() as (link, server):
        async with stream(link) as (heard, task):
            await until(lambda: server.streams)
            assert link.open.is_set()
            for each in (*said, None):
                server.streams[0].unsent.put_nowait(each)
            with pytest.raises(Broken, match="closed the connection"):
                await task
            assert heard == [StreamOpened(), *said]
            assert not link.open.is_set()
            await server.streams[0].closed.wait()
        assert server.hellos == [("kiel", HELLO)]


@pytest.mark.parametrize(
    ("ended", "raised"), [(Replaced("a newer stream"), Replaced), (Unreachable("gone"), Broken), (CUT, Broken)]
)
async def test_a_stream_ends_with_what_the_server_named_or_breaks(linked, ended, raised):
    async with linked() as (link, server), stream(link) as (_, task):
        await until(lambda: server.streams)
        server.streams[0].unsent.put_nowait(ended)
        with pytest.raises(raised, match=str(ended)):
            await task


async def test_what_is_said_reaches_the_server_while_there_is_a_stream(linked):
    async with linked() as (link, server):
        link.progress("before", 0.1)
        async with stream(link):
            link.progress("train-1-kiel", 0.25)
            link.trouble("train-1-kiel", "too hot")
            await until(lambda: len(server.said) == 2)
        link.trouble("after", "late")
        assert server.said == [("train-1-kiel", 0.25), ("train-1-kiel", "too hot")]


@pytest.mark.parametrize("offset", [0, 1, 49_999, 50_000])
async def test_a_blob_is_read_from_any_offset(linked, offset):
    async with linked() as (link, server):
        got = bytearray()
        await link.read(server.offer(DATA), offset, got.extend)
        assert bytes(got) == DATA[offset:]


async def test_a_download_that_breaks_keeps_what_came(linked):
    async with linked() as (link, server):
        got, digest = bytearray(), server.offer(DATA)
        server.downloads_fail = [20_000]
        with pytest.raises(Broken):
            await link.read(digest, 0, got.extend)
        assert DATA.startswith(got)
        await link.read(digest, len(got), got.extend)
        assert bytes(got) == DATA


async def test_what_was_not_offered_is_unknown(linked):
    async with linked() as (link, _):
        with pytest.raises(UnknownBlob):
            await link.read("sha256:" + "0" * 64, 0, lambda frame: None)


async def test_an_upload_that_breaks_goes_on_where_the_server_is(linked):
    async with linked() as (link, server):
        server.uploads_fail = [6_000]
        with pytest.raises(Broken):
            await link.upload(TARGET, frames(DATA))
        offset = await link.upload_offset(TARGET)
        assert offset == 6_000
        await link.upload(UploadTarget(TARGET.order_id, TARGET.part, TARGET.digest, TARGET.size, offset), frames(DATA[offset:]))
        assert server.here[TARGET.digest] == DATA
        assert server.offsets == [0, 6_000]


@pytest.mark.parametrize(
    "kind", [OrderClosed, UploadTakenOver, Stalled, DiskFull, DigestMismatch, LimitExceeded], ids=lambda kind: kind.kind
)
async def test_every_refusal_of_an_upload_has_its_own_name(linked, kind: type[AttuneError]):
    async with linked() as (link, server):
        server.uploads_fail = [kind("no")]
        with pytest.raises(kind, match="no") as caught:
            await link.upload(TARGET, frames(DATA))
        assert caught.type is kind


async def test_an_update_is_in_time_or_late_or_refused(linked):
    async with linked() as (link, server):
        assert await link.submit(UPDATE)
        assert server.submits == [UPDATE]
        server.late = True
        assert not await link.submit(UPDATE)
        server.submits_fail = [UpdateRefused("the norm is too large"), CUT]
        with pytest.raises(UpdateRefused, match="norm"):
            await link.submit(UPDATE)
        with pytest.raises(Broken):
            await link.submit(UPDATE)


@pytest.mark.parametrize("what", ["read", "upload", "submit"])
async def test_a_cancelled_job_hears_of_its_cancellation_alone(linked, what):
    async with linked() as (link, server):
        digest, server.stuck = server.offer(DATA), asyncio.Event()
        calls = {
            "read": lambda: link.read(digest, 0, lambda frame: None),
            "upload": lambda: link.upload(TARGET, frames(DATA)),
            "submit": lambda: link.submit(UPDATE),
        }
        job = asyncio.create_task(calls[what]())
        await server.stuck.wait()
        job.cancel()
        await asyncio.wait([job])
        assert job.cancelled()


async def test_closing_the_link_needs_nobody_on_the_other_side(linked):
    async with linked() as (link, _):
        await link.close()
        assert not link.open.is_set()
