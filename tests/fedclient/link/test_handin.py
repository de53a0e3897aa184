"""Upload of a result, which depends on the server's abilities: within the update, or followed by it at once."""

from __future__ import annotations

import asyncio

import pytest

from attune.common.errors import UnknownBlob, UpdateRefused
from attune.common.exchange.messages import BlobRef, Update, Welcome
from attune.common.wire.malformed import DigestMismatch
from attune.common.wire.tensors import manifest_of
from attune.fedclient.link.grpc_link import GrpcLink
from attune.fedclient.link.handin import send
from attune.fedclient.link.port import Broken, Link
from attune.fedclient.link.transfer import ATTEMPTS, fetch
from attune.fedclient.messages import OrderResult, SendRefused, Sent
from attune.fedclient.work.state import FolderOrders
from tests.fedclient.link.conftest import ORDER, TENSORS
from tests.fedclient.link.server import CUT, Scripted
from tests.fedclient.link.test_conformance import stream, until

Committed = tuple[FolderOrders, OrderResult]


def hand_in(play, committed: Committed, server_says: dict[str, object], **script: object):
    """Hand in a result. Return the outcome and the server."""
    orders, result = committed

    async def scenario(link: Link, server: Scripted):
        vars(server).update(script)
        async with stream(link):
            vars(link).update(server_says)
            return await send(link, orders, result, False, lambda line: None), server

    return play(scenario)


@pytest.mark.parametrize("room", [0, -1])
def test_small_parts_go_within_the_update(play, committed: Committed, room: int) -> None:
    orders, result = committed
    [part] = result.parts
    came, server = hand_in(play, committed, {"inline_bytes": part.size + room})
    assert came == Sent(ORDER, late=False)
    [update] = server.submits
    data = orders.blob(ORDER, "shared").read_bytes()
    assert [ref.data for ref in update.parts] == [data if room == 0 else b""]
    assert server.offsets == ([] if room == 0 else [0]), "and are not uploaded as well"


def test_what_the_server_does_not_find_in_the_update_is_uploaded(play, committed: Committed) -> None:
    came, server = hand_in(play, committed, {"inline_bytes": 1 << 20}, submits_fail=[UnknownBlob("not here")])
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
    came, server = hand_in(play, committed, {"waits": True}, uploads_fail=[9_000, 20_000])
    assert came == Sent(ORDER, late=False)
    assert server.offsets == [0, 9_000, 20_000]
    assert len(server.submits) == 1


def test_an_upload_whose_answer_is_lost_is_not_repeated_once_the_update_is_accepted(play, committed: Committed) -> None:
    """Lose every answer to an upload after that to the update. The server has put the bytes aside and knows no offset."""
    orders, result = committed

    async def scenario(link: Link, server: Scripted):
        async def end(target: object, whole: bytearray) -> int:
            await until(lambda: server.submits)
            await asyncio.sleep(0.1)
            server.here.clear()
            raise CUT

        vars(server).update(end=end)
        async with stream(link):
            link.waits = True
            return await send(link, orders, result, False, lambda line: None), server.offsets

    assert play(scenario) == (Sent(ORDER, late=False), [0])


def test_who_refused_what_is_known_while_both_are_under_way(play, committed: Committed) -> None:
    faults = [DigestMismatch("other bytes") for _ in range(ATTEMPTS)]

    async def scenario(link: Link, server: Scripted):
        vars(server).update(uploads_fail=faults, submit=lambda name, update: asyncio.Event().wait())
        async with stream(link):
            link.waits = True
            return await send(link, *committed, False, lambda line: None)

    assert play(scenario) == SendRefused(ORDER, "other bytes", known=False)
    came, _ = hand_in(play, committed, {"waits": True}, submits_fail=[UpdateRefused("norm")])
    assert came == SendRefused(ORDER, "norm", known=True)


def test_a_blob_within_the_order_is_checked_as_one_that_is_downloaded(play, committed: Committed) -> None:
    orders, result = committed
    [part] = result.parts
    data = orders.blob(ORDER, "shared").read_bytes()

    async def scenario(link: Link, server: Scripted):
        found = await fetch(link, BlobRef("shared", part.digest, part.size, data=data), manifest_of(TENSORS), print)
        for wrong in (data[:-1] + b"!", data[:-1], data + b"!"):
            with pytest.raises(Exception, match="shared from the server"):
                await fetch(link, BlobRef("shared", part.digest, part.size, data=wrong), manifest_of(TENSORS), print)
        return found

    assert play(scenario)["head.weight"].equal(TENSORS["head.weight"])


def test_what_the_server_says_of_itself_counts_for_its_stream(play) -> None:
    """Use two servers behind one address, of which the second is older. Over the network, abilities are a part of Welcome."""

    async def scenario(link: Link, server: Scripted) -> None:
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

    play(scenario)
