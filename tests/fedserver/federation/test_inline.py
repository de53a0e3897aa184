"""Small blobs travel within orders and updates; an update can come before its blobs and wait."""

import asyncio
from typing import Any

import pytest

from attune.common import aio
from attune.common.errors import LimitExceeded, UnknownBlob
from attune.common.exchange.messages import BlobRef, Order, Receipt, Update, UploadTarget
from attune.common.wire.digest import digest_of
from attune.common.wire.malformed import DigestMismatch
from attune.fedserver.federation.updates import PendingUploads, Updates
from attune.fedserver.stores.uploads import Sink
from tests.fedserver.conftest import World
from tests.fedserver.federation.test_coordinator import FEDAVG, Server, hello, next_order, running


async def orders(server: Server, *inline_bytes: int) -> list[Order]:
    streams = [server.members.connect(name, hello(room)) for name, room in zip(("a", "b"), inline_bytes, strict=True)]
    return [await next_order(stream) for stream in streams]


def read(server: Server, name: str, order: Order) -> bytes:
    [ref] = order.downloads
    return server.blobs.get(server.state.book.offer(name, ref.digest).name)


@pytest.mark.parametrize("setting", [1 << 16, 0])
async def test_an_order_carries_what_the_device_takes_and_the_server_gives(world: World, setting: int) -> None:
    async with running(world, {**FEDAVG, "server": {"inline_bytes": setting}}) as server:
        first, second = await orders(server, 1 << 20, 0)
        carried = read(server, "a", first) if setting else b""
        assert [ref.data for ref in first.downloads] == [carried]
        assert [ref.data for ref in second.downloads] == [b""], "this device has not said that it takes any"
        assert server.state.book.order("a", first.id).downloads[0].data == b"", "the book need not hold it"


async def test_a_blob_beyond_the_room_is_offered_as_ever(world: World) -> None:
    async with running(world, FEDAVG) as server:
        for order in await orders(server, 100, 100):
            [ref] = order.downloads
            assert ref.size > 100 and ref.data == b""


def updates_of(server: Server) -> Updates:
    return server.coordinator.updates


def update(order: Order, data: bytes, digest: str = "") -> Update:
    ref = BlobRef("shared", digest or digest_of(data), len(data), 0, data=data)
    return Update(order.id, (ref,), 10, b"{}")


async def test_an_update_that_carries_its_blobs_counts_as_one_whose_blobs_were_uploaded(world: World) -> None:
    async with running(world, FEDAVG) as server:
        updates = updates_of(server)
        given = await orders(server, 1 << 20, 1 << 20)
        for name, order in zip(("a", "b"), given, strict=True):
            data = order.downloads[0].data
            assert await updates.submit(name, update(order, data)) == Receipt()
            assert await updates.submit(name, update(order, data)) == Receipt(), "and sent again it is accepted again"
        await server.closed(1)
        rows = (await server.ledger.snapshot()).rows
        assert [row.bytes_up for row in rows] == [order.downloads[0].size for order in given]


async def test_what_an_update_carries_is_checked(world: World) -> None:
    async with running(world, FEDAVG) as server:
        updates = updates_of(server)
        [order, _] = await orders(server, 1 << 20, 1 << 20)
        data = order.downloads[0].data
        with pytest.raises(DigestMismatch):
            await updates.submit("a", update(order, data[:-1] + b"!", order.downloads[0].digest))
        with pytest.raises(LimitExceeded, match="more than 65536 bytes"):
            await updates.submit("a", update(order, bytes((1 << 16) + 1)))
        assert server.state.inbox.names("train", 1) == set()


async def test_an_update_waits_for_the_blobs_that_are_on_their_way(world: World) -> None:
    async with running(world, FEDAVG) as server:
        updates = updates_of(server)
        [order, _] = await orders(server, 1 << 20, 1 << 20)
        data = order.downloads[0].data
        named = Update(order.id, (BlobRef("shared", digest_of(data), len(data), 0),), 10, b"{}")
        with pytest.raises(UnknownBlob):
            await updates.submit("a", named)
        target = UploadTarget(order.id, "shared", digest_of(data), len(data))
        with updates.pending_uploads.stream("a", target.digest):
            waiting = asyncio.create_task(updates.submit("a", named))
            sink = await updates.open("a", target)
            await updates.write("a", target, sink, [data])
            assert not waiting.done()
            await updates.complete("a", target, sink)
        assert await waiting == Receipt()


async def test_nobody_waits_for_what_has_come_or_nobody_brings() -> None:
    arrivals = PendingUploads()
    await arrivals.wait("a", ["x"])
    older, newer = arrivals.stream("a", "x"), arrivals.stream("a", "x")
    older.__enter__()  # it makes no progress, and is taken over
    newer.__enter__()
    waiting = asyncio.create_task(arrivals.wait("a", ["x"]))
    await asyncio.sleep(0)
    assert not waiting.done()
    await arrivals.wait("b", ["x"])  # the same blob of another device
    newer.__exit__(None, None, None)
    async with aio.timeout(10):
        await waiting
    older.__exit__(None, None, None)
    with pytest.raises(ZeroDivisionError), arrivals.stream("a", "x"):
        waiting = asyncio.create_task(arrivals.wait("a", ["x"]))
        await asyncio.sleep(0)
        raise ZeroDivisionError
    async with aio.timeout(10):
        await waiting
    assert repr(arrivals) == "PendingUploads([])"


async def test_an_upload_that_is_sent_again_while_its_update_is_taken_in_changes_nothing(world: World, monkeypatch) -> None:
    """Send again what the server has already, as a device does after a restart; its update may arrive earlier."""
    async with running(world, FEDAVG) as server:
        updates, [order, _] = updates_of(server), await orders(server, 1 << 20, 1 << 20)
        data, lab = order.downloads[0].data, server.state.lab
        target = UploadTarget(order.id, "shared", digest_of(data), len(data))
        work, sinks = server.state.lab.arrive, list[Sink]()

        async def again(*arguments: Any) -> Any:
            sinks.append(await updates.open("a", target))
            return await work(*arguments)

        monkeypatch.setattr(lab, "arrive", again)
        assert await updates.submit("a", update(order, data)) == Receipt()
        await updates.complete("a", target, *sinks)


async def test_an_upload_of_other_bytes_while_an_update_is_taken_in_is_no_damage(world: World, monkeypatch) -> None:
    async with running(world, FEDAVG) as server:
        updates, [order, _] = updates_of(server), await orders(server, 1 << 20, 1 << 20)
        data, lab = order.downloads[0].data, server.state.lab
        work = server.state.lab.arrive

        async def other(*arguments: Any) -> Any:
            monkeypatch.setattr(lab, "arrive", work)
            (await updates.open("a", UploadTarget(order.id, "shared", digest_of(b"other"), 5))).close()
            return await work(*arguments)

        monkeypatch.setattr(lab, "arrive", other)
        with pytest.raises(UnknownBlob, match="sends shared again"):
            await updates.submit("a", update(order, data))
        assert await updates.submit("a", update(order, data)) == Receipt()
