"""Uploads over any link: a cut, a take-over, a stall, damaged bytes and a full disk."""

from __future__ import annotations

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
from attune.common.exchange.messages import BlobRef
from attune.common.protocol import ENCODINGS
from attune.common.wire.header import Manifest
from attune.common.wire.malformed import DigestMismatch, Malformed
from attune.common.wire.tensors import manifest_of
from attune.fedclient.link.handin import send
from attune.fedclient.link.port import Link
from attune.fedclient.link.transfer import ASKS, ATTEMPTS, fetch
from attune.fedclient.messages import SendRefused, Sent
from attune.fedclient.work.orders import rebuilt
from tests.fedclient.link.conftest import ORDER, TENSORS
from tests.fedclient.link.server import Scripted
from tests.fedclient.link.test_conformance import stream


def hand_in(play, committed, said=None, **faults):
    """Hand in a result. Return the outcome, the device's lines for people, and the server."""
    orders, result = committed
    lines: list[str] = [] if said is None else said

    async def scenario(link: Link, server: Scripted):
        vars(server).update({name: list(fault) if isinstance(fault, list) else fault for name, fault in faults.items()})
        async with stream(link):
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


def test_a_download_goes_on_where_it_broke_and_starts_again_where_it_was_damaged(play, committed):
    orders, _ = committed
    data = orders.blob(ORDER, "shared").read_bytes()
    expected: Manifest = manifest_of(TENSORS)

    async def scenario(link: Link, server: Scripted):
        digest = server.offer(data)
        server.downloads_fail = [5_000, 1_000]
        async with stream(link):
            return await fetch(link, BlobRef("shared", digest, len(data)), expected, [].append)

    assert play(scenario)["head.weight"].equal(TENSORS["head.weight"])


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


def test_a_download_waits_for_a_restarted_server_to_know_the_order_again(play, committed):
    orders, _ = committed
    data = orders.blob(ORDER, "shared").read_bytes()
    unknown = UnknownBlob("kiel was not offered this blob")

    async def scenario(link: Link, server: Scripted):
        digest = server.offer(data)
        server.downloads_fail = [unknown, unknown]
        async with stream(link):
            await fetch(link, BlobRef("shared", digest, len(data)), manifest_of(TENSORS), [].append)
            server.downloads_fail = [unknown] * ASKS
            with pytest.raises(UnknownBlob):
                await fetch(link, BlobRef("shared", digest, len(data)), manifest_of(TENSORS), [].append)
            assert not server.downloads_fail

    play(scenario)


def test_a_job_that_is_cancelled_in_the_moment_its_upload_breaks_does_not_go_on(play, committed):
    """Cut the connection, which breaks the upload and, through the control stream, cancels the job at the same time."""
    orders, result = committed

    async def scenario(link: Link, server: Scripted):
        async with stream(link):
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

    play(scenario)
