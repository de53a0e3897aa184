"""Uploads over any link: within the update or followed by it, and a cut, a take-over, a stall, damage and a full disk."""

import asyncio

import pytest
import torch
from safetensors.torch import save

from attune.common.errors import (
    CertificateRefused,
    DiskFull,
    LimitExceeded,
    OrderClosed,
    Stalled,
    UnknownBlob,
    UpdateRefused,
    UploadBusy,
    UploadTakenOver,
    WireError,
)
from attune.common.exchange.encodings import encode
from attune.common.exchange.messages import BlobRef, Update, Welcome
from attune.common.protocol import ENCODINGS
from attune.common.wire.header import Manifest
from attune.common.wire.malformed import DigestMismatch, Malformed
from attune.common.wire.tensors import manifest_of
from attune.fedclient.link.grpc_link import GrpcLink
from attune.fedclient.link.port import Broken, Link
from attune.fedclient.link.transfer import ASKS, ATTEMPTS, fetch, send
from attune.fedclient.messages import OrderResult, SendRefused, Sent
from attune.fedclient.work.orders import rebuilt
from attune.fedclient.work.state import FolderOrders
from tests.fedclient.link.conftest import ORDER, TENSORS
from tests.fedclient.link.server import CUT, Scripted
from tests.fedclient.link.test_conformance import stream, until


def hand_in(play, committed, server_says={}, **script):  # noqa: B006
    """Hand in a result. Return the outcome, the device's lines for people, and the server."""
    orders, result = committed
    lines: list[str] = []

    async def scenario(link: Link, server: Scripted):
        vars(server).update({name: list(fault) if isinstance(fault, list) else fault for name, fault in script.items()})
        async with stream(link):
            vars(link).update(server_says)
            came = await send(link, orders, result, False, lines.append)
            await asyncio.sleep(0.05)
        return came, lines, server

    return play(scenario)


@pytest.mark.parametrize("fault", [9_000, UploadTakenOver("newer"), Stalled("60 s"), UploadBusy("open")], ids=repr)
def test_an_upload_that_is_interrupted_goes_on_from_where_the_server_is(play, committed, fault):
    came, said, server = hand_in(play, committed, uploads_fail=[fault])
    assert came == Sent(ORDER, late=False)
    size = committed[1].parts[0].size
    assert server.offsets == [0, fault if isinstance(fault, int) else size]
    assert len(server.submits) == 1
    assert said == []


@pytest.mark.parametrize("faults", [{"uploads_fail": [OrderClosed("over")]}, {"late": True}], ids=["upload", "submit"])
def test_an_order_that_is_closed_makes_the_update_late(play, committed, faults):
    assert hand_in(play, committed, **faults)[0] == Sent(ORDER, late=True)


def test_bytes_that_arrive_damaged_again_and_again_are_given_up(play, committed):
    faults = [DigestMismatch("other bytes") for _ in range(ATTEMPTS)]
    came, _, server = hand_in(play, committed, uploads_fail=faults)
    assert came == SendRefused(ORDER, "other bytes", known=False)
    assert server.submits == []


def test_who_refused_what_decides_whether_the_server_must_be_told(play, committed):
    assert hand_in(play, committed, uploads_fail=[LimitExceeded("too big")])[0] == SendRefused(ORDER, "too big", known=False)
    assert hand_in(play, committed, submits_fail=[UpdateRefused("norm")])[0] == SendRefused(ORDER, "norm", known=True)


def test_a_revoked_device_is_no_refused_update(play, committed):
    with pytest.raises(CertificateRefused):
        hand_in(play, committed, submits_fail=[CertificateRefused("revoked")])


@pytest.mark.parametrize("where", ["uploads_fail", "submits_fail"])
def test_a_full_disk_is_said_once_on_both_sides_and_ends_when_there_is_room(play, committed, where):
    came, said, server = hand_in(play, committed, **{where: [DiskFull("no space on the server") for _ in range(9)]})
    assert came == Sent(ORDER, late=False)
    assert said == ["the server has no room for this update: no space on the server (trying on)"]
    assert server.said == [(ORDER, "no space on the server")]


async def test_a_download_goes_on_where_it_broke_and_starts_again_where_it_was_damaged(linked, committed):
    orders, _ = committed
    data = orders.blob(ORDER, "shared").read_bytes()
    expected: Manifest = manifest_of(TENSORS)
    async with linked() as (link, server):
        digest = server.offer(data)
        server.downloads_fail = [5_000, 1_000]
        async with stream(link):
            came = await fetch(link, BlobRef("shared", digest, len(data)), expected, [].append)
        assert came["head.weight"].equal(TENSORS["head.weight"])


def downloaded(play, data: bytes, encoding: str):
    """Return what a device reads from such a blob, which is served for TENSORS."""
    expected = manifest_of(TENSORS)

    async def scenario(link: Link, server: Scripted):
        ref = BlobRef("shared", server.offer(data), len(data), encoding=encoding)
        async with stream(link):
            return rebuilt(ref, expected, await fetch(link, ref, expected, [].append), {})

    return play(scenario)


@pytest.mark.skipif("zstd" not in ENCODINGS, reason="needs the extra zstd")
def test_what_is_served_in_fewer_bytes_arrives_as_it_is(play):
    data = save(encode(TENSORS, "zstd").tensors)
    assert len(data) < TENSORS["head.weight"].nbytes
    assert downloaded(play, data, "zstd")["head.weight"].equal(TENSORS["head.weight"])


@pytest.mark.skipif("zstd" not in ENCODINGS, reason="needs the extra zstd")
@pytest.mark.parametrize(
    ("tensors", "kind"),
    [
        ({"head.weight": torch.full((16,), 255, dtype=torch.uint8)}, "bad-frame"),
        ({"head.weight": torch.zeros(10_000)[:9_999]}, "wrong-shape"),
        ({"head.weight": torch.zeros(10_000), "more": torch.zeros(3, dtype=torch.uint8)}, "unexpected-tensor"),
        ({}, "missing-tensor"),
    ],
    ids=["no frame", "short", "more", "nothing"],
)
def test_a_server_that_serves_something_else_is_refused(play, tensors, kind):
    with pytest.raises(Malformed, match="the part shared from the server") as caught:
        downloaded(play, save(tensors), "zstd")
    assert caught.value.kind == kind


def test_an_encoding_of_a_newer_server_is_refused(play):
    with pytest.raises(WireError, match=r"written as 'int4': update fedclient"):
        downloaded(play, save(TENSORS), "int4")


async def test_a_download_waits_for_a_restarted_server_to_know_the_order_again(linked, committed):
    orders, _ = committed
    data = orders.blob(ORDER, "shared").read_bytes()
    unknown = UnknownBlob("kiel was not offered this blob")
    async with linked() as (link, server):
        digest = server.offer(data)
        server.downloads_fail = [unknown, unknown]
        async with stream(link):
            await fetch(link, BlobRef("shared", digest, len(data)), manifest_of(TENSORS), [].append)
            server.downloads_fail = [unknown] * ASKS
            with pytest.raises(UnknownBlob):
                await fetch(link, BlobRef("shared", digest, len(data)), manifest_of(TENSORS), [].append)
            assert not server.downloads_fail


async def test_a_job_that_is_cancelled_in_the_moment_its_upload_breaks_does_not_go_on(linked, committed):
    """Cut the connection, which breaks the upload and, through the control stream, cancels the job at the same time."""
    orders, result = committed
    async with linked() as (link, server), stream(link):
        server.stuck = asyncio.Event()
        job = asyncio.create_task(send(link, orders, result, False, [].append))
        await server.stuck.wait()
        server.stuck = None
        await link.close()  # this breaks all calls
        job.cancel()
        await asyncio.wait([job])
        assert job.cancelled()
        await asyncio.sleep(0.2)
        assert server.offsets == [0]


Committed = tuple[FolderOrders, OrderResult]


@pytest.mark.parametrize("room", [0, -1])
def test_small_parts_go_within_the_update(play, committed: Committed, room: int) -> None:
    orders, result = committed
    [part] = result.parts
    came, _, server = hand_in(play, committed, {"inline_bytes": part.size + room})
    assert came == Sent(ORDER, late=False)
    [update] = server.submits
    data = orders.blob(ORDER, "shared").read_bytes()
    assert [ref.data for ref in update.parts] == [data if room == 0 else b""]
    assert server.offsets == ([] if room == 0 else [0]), "and are not uploaded as well"


def test_what_the_server_does_not_find_in_the_update_is_uploaded(play, committed: Committed) -> None:
    came, _, server = hand_in(play, committed, {"inline_bytes": 1 << 20}, submits_fail=[UnknownBlob("not here")])
    assert came == Sent(ORDER, late=False)
    [update] = server.submits
    assert [ref.data for ref in update.parts] == [b""]
    assert len(server.offsets) == 1


@pytest.mark.parametrize("waits", [True, False])
def test_the_update_follows_the_last_byte_if_the_server_waits_for_it(play, committed: Committed, waits: bool) -> None:
    """Make the server answer an upload only when it has the update too, or has waited for it in vain."""
    orders, result = committed

    async def scenario(link: Link, server: Scripted):
        came_before: list[bool] = []

        async def end(target: object, whole: bytearray) -> int:
            for _ in range(200 if waits else 20):
                if server.submits:
                    break
                await asyncio.sleep(0.01)
            came_before.append(bool(server.submits))
            return len(whole)

        vars(server).update(end=end)
        async with stream(link):
            link.waits = waits
            return await send(link, orders, result, False, lambda line: None), came_before

    assert play(scenario) == (Sent(ORDER, late=False), [waits])


def test_an_update_that_overtakes_its_upload_again_and_again_follows_it_in_the_end(play, committed: Committed) -> None:
    """Make the server look at the update before the upload each time, as a busy one may, and ask for the bytes."""
    orders, result = committed

    async def scenario(link: Link, server: Scripted):
        here: list[bool] = []

        async def end(target: object, whole: bytearray) -> int:
            await asyncio.sleep(0.1)
            here.append(True)
            return len(whole)

        async def submit(name: str, update: Update) -> bool:
            if not here:
                raise UnknownBlob("not here")
            return True

        vars(server).update(end=end, submit=submit)
        async with stream(link):
            link.waits = True
            return await send(link, orders, result, False, lambda line: None)

    assert play(scenario) == Sent(ORDER, late=False)


def test_an_upload_that_breaks_is_gone_on_with_before_the_update_follows(play, committed: Committed) -> None:
    came, _, server = hand_in(play, committed, {"waits": True}, uploads_fail=[9_000, 20_000])
    assert came == Sent(ORDER, late=False)
    assert server.offsets == [0, 9_000, 20_000]
    assert len(server.submits) == 1


async def test_an_upload_whose_answer_is_lost_is_not_repeated_once_the_update_is_accepted(linked, committed: Committed) -> None:
    """Lose every answer to an upload after that to the update. The server has put the bytes aside and knows no offset."""
    orders, result = committed
    async with linked() as (link, server):

        async def end(target: object, whole: bytearray) -> int:
            await until(lambda: server.submits)
            await asyncio.sleep(0.1)
            server.here.clear()
            raise CUT

        vars(server).update(end=end)
        async with stream(link):
            link.waits = True
            assert await send(link, orders, result, False, lambda line: None) == Sent(ORDER, late=False)
            assert server.offsets == [0]


def test_who_refused_what_is_known_while_both_are_under_way(play, committed: Committed) -> None:
    faults = [DigestMismatch("other bytes") for _ in range(ATTEMPTS)]
    never = {"submit": lambda name, update: asyncio.Event().wait()}
    came, *_ = hand_in(play, committed, {"waits": True}, uploads_fail=faults, **never)
    assert came == SendRefused(ORDER, "other bytes", known=False)
    came, *_ = hand_in(play, committed, {"waits": True}, submits_fail=[UpdateRefused("norm")])
    assert came == SendRefused(ORDER, "norm", known=True)


async def test_a_blob_within_the_order_is_checked_as_one_that_is_downloaded(linked, committed: Committed) -> None:
    orders, result = committed
    [part] = result.parts
    data = orders.blob(ORDER, "shared").read_bytes()
    async with linked() as (link, _):
        found = await fetch(link, BlobRef("shared", part.digest, part.size, data=data), manifest_of(TENSORS), print)
        for wrong in (data[:-1] + b"!", data[:-1], data + b"!"):
            with pytest.raises(Exception, match="shared from the server"):
                await fetch(link, BlobRef("shared", part.digest, part.size, data=wrong), manifest_of(TENSORS), print)
        assert found["head.weight"].equal(TENSORS["head.weight"])


async def test_what_the_server_says_of_itself_counts_for_its_stream(linked) -> None:
    """Use two servers behind one address, of which the second is older. Over the network, abilities are a part of Welcome."""
    async with linked() as (link, server):
        server.says = {"inline_bytes": 5_000, "waits": True}
        async with stream(link) as (_, task):
            await until(lambda: server.streams)
            for said in (Welcome(b"plan"), None):
                server.streams[-1].unsent.put_nowait(said)
            with pytest.raises(Broken):
                await task
            assert (link.inline_bytes, link.waits) == ((5_000, True) if isinstance(link, GrpcLink) else (0, False))
        async with stream(link):
            await until(lambda: len(server.streams) == 2)
            assert (link.inline_bytes, link.waits) == (0, False)
