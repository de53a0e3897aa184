"""Newcomers that tell of their data before they are served: the server waits for that, and for nobody else."""

import asyncio
from functools import partial
from typing import Any

import torch

from attune.common.exchange.messages import BlobRef, Description, Order
from attune.common.protocol import DESCRIPTION
from attune.common.wire.files import read_tensors, write_tensors
from attune.fedserver.core.records import Report
from attune.fedserver.federation.streams import Stream
from tests.fedserver.conftest import World
from tests.fedserver.federation.test_coordinator import Server, hello, id_of, next_order, running

FOUNDERS = "abcde"
SETTINGS = {
    "method": {"name": "pfedhn", "embedding": "described"},
    "model": {"name": "mlr"},
    "round": {"rounds": 1, "min_clients": len(FOUNDERS)},
}


def said_by(name: str) -> Description:
    """Return means and deviations of the three features of a linear model."""
    return Description((float(ord(name) - ord("a")), 0.0, 1.0, 1.0, 1.0, 1.0))


def connected(server: Server, name: str, encodings: tuple[str, ...] = (DESCRIPTION,)) -> Stream:
    return server.members.connect(name, hello(encodings=encodings))


async def founded(server: Server) -> None:
    """Train five devices in the one round, each toward weights of its own."""
    streams = [connected(server, name) for name in FOUNDERS]
    for stream in streams:
        order = await next_order(stream)
        server.members.described(stream.name, said_by(stream.name))
        served = (await server.state.lab.serve([stream.name]))[stream.name]["generated"]
        change = {
            name: torch.full_like(tensor, 0.1 * (ord(stream.name) - ord("c")))
            for name, tensor in read_tensors(server.blobs.open(served)).items()
        }
        part = write_tensors(partial(server.blobs.create, f"uploads/{stream.name}"), change)
        row = Report(round=order.round, work=order.work, client=stream.name, samples=10)
        server.state.inbox.accept(id_of(order), row, {"generated": part})
        assert await server.coordinator.updates.report(id_of(order))
    await server.closed(1)
    for stream in streams:
        assert await server.answer(id_of(await next_order(stream)))


def generated(order: Order) -> BlobRef:
    [ref] = [ref for ref in order.downloads if ref.part == "generated"]
    return ref


def common(order: Order) -> BlobRef:
    [ref] = [ref for ref in order.cold_start if ref.part == "generated"]
    return ref


async def waits(stream: Stream) -> asyncio.Task[Order]:
    """Return the wait for a device's order, which has not ended."""
    waiting = asyncio.create_task(next_order(stream))
    done, _ = await asyncio.wait({waiting}, timeout=0.2)
    assert not done, "it has an order before it has told of its data"
    return waiting


async def test_a_newcomer_is_served_after_it_has_told_of_its_data(world: World) -> None:
    async with running(world, SETTINGS, FOUNDERS) as server:
        await founded(server)
        await server.enrol("new", "mute", "old")
        waiting = await waits(connected(server, "new"))
        server.members.described("new", said_by("a"))
        server.members.described("new", said_by("e"))  # the first word stands
        order = await waiting
        assert generated(order).digest != common(order).digest
        z = server.state.lab._engine.groups.of("", "generated").aggregator._load().embeddings  # type: ignore[attr-defined]
        distance = {name: float(torch.dist(z.values(["new"]), z.values([name]))) for name in FOUNDERS}
        assert min(distance, key=distance.__getitem__) == "a"

        waiting = await waits(connected(server, "mute"))
        server.members.described("mute", Description(()))
        order = await waiting
        assert generated(order).digest == common(order).digest, "it says nothing, so it begins with the mean"
        order = await next_order(connected(server, "old", ()))
        assert generated(order).digest == common(order).digest, "nobody waits for a device that will not tell"


async def test_a_restarted_server_waits_until_the_newcomer_tells_again(world: World) -> None:
    found: list[str] = []

    async with running(world, SETTINGS, FOUNDERS) as server:
        await founded(server)
        await server.enrol("new")
        stream = connected(server, "new")
        server.members.described("new", said_by("b"))
        found.append(generated(await next_order(stream)).digest)
    async with running(world, SETTINGS, FOUNDERS) as server:
        waiting = await waits(connected(server, "new"))
        server.members.described("new", said_by("b"))
        found.append(generated(await waiting).digest)
    assert found[0] == found[1]


async def test_a_description_that_nobody_asked_for_changes_nothing(world: World) -> None:
    trained: dict[str, Any] = SETTINGS | {"method": {"name": "pfedhn"}}

    async with running(world, trained, FOUNDERS) as server:
        await founded(server)
        await server.enrol("new")
        stream = connected(server, "new")
        server.members.described("new", said_by("a"))
        order = await next_order(stream)
        assert generated(order).digest == common(order).digest
