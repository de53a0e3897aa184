"""Revocations at any moment: the server goes on, and the other devices come to the end."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from attune.common import aio
from attune.common.errors import CertificateRefused
from attune.common.wire.files import TensorFile, write_tensors
from attune.fedserver.core.messages import OrderId, Phase
from attune.fedserver.core.records import Report
from attune.fedserver.federation.streams import Stream
from tests.fedserver.conftest import world_on_disk
from tests.fedserver.federation.test_coordinator import Server, id_of, next_order, process

DEVICES, REVOKED, ROUNDS = "abcdef", 3, 5
METHODS = {
    "fedavg": {},
    "fedmcsa": {},
    "fedtp": {"model": {"name": "transformer", "width": 8, "depth": 1, "heads": 2}},
    "buffered": {"method": {"name": "fedavg"}, "round": {"buffer": 2}},
}


async def hand_in(server: Server, order: OrderId, parts: tuple[str, ...], attempt: int) -> None:
    """Hand in the parts that the device is served, changed."""
    coordinator, kept = server.coordinator, {}
    served = (await coordinator.lab.serve([order.client]))[order.client]
    for part in parts:
        with TensorFile(server.blobs.open(served[part])) as file:
            changed = {name: tensor + 0.01 for name, tensor in file.items()}
        kept[part] = write_tensors(partial(server.blobs.create, f"uploads/{order.client}-{part}-{attempt}"), changed)
    row = Report(round=order.round, work=order.work, client=order.client, samples=10, accuracy_before=0.5, test_samples=4)
    await coordinator._executors.disk(coordinator.inbox.accept, order, row, kept)
    if not await coordinator.report(order):
        await coordinator._executors.disk(coordinator.inbox.discard, order)


async def device(server: Server, stream: Stream, rng: random.Random) -> None:
    for attempt in range(10 * ROUNDS):
        try:
            order = await next_order(stream)
        except CertificateRefused:
            return
        await asyncio.sleep(rng.uniform(0, 0.02))
        await hand_in(server, id_of(order), order.returns, attempt)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("method", METHODS)
def test_no_revocation_stops_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, seed: int) -> None:
    """Revoke half of the devices at random moments, while each step on the disk and in the lab takes a random time."""
    rng = random.Random(seed)

    async def scenario(server: Server) -> None:
        coordinator = server.coordinator
        for owner, name in ((coordinator._executors, "disk"), (coordinator.lab, "aggregate")):
            step = getattr(owner, name)

            async def slow(*arguments: Any, step: Any = step) -> Any:
                await asyncio.sleep(rng.uniform(0, 0.01))
                return await step(*arguments)

            monkeypatch.setattr(owner, name, slow)
        at_work = [asyncio.create_task(device(server, stream, rng)) for stream in server.connect(*DEVICES)]
        for name in rng.sample(DEVICES, REVOKED):
            await asyncio.sleep(rng.uniform(0, 0.15))
            await server.ledger.update_device(name, revoked=True)
            await server.members.shut_out({name: CertificateRefused(f"{name} is revoked")})
        async with aio.timeout(30):
            await coordinator.finished.wait()
        assert coordinator.error is None
        assert coordinator.round.record.phase is Phase.DONE
        for each in at_work:
            each.cancel()
        await asyncio.gather(*at_work, return_exceptions=True)

    more = METHODS[method]
    rounds = {"rounds": ROUNDS, "min_clients": len(DEVICES) - REVOKED, "evaluate_each_last": 0} | more.get("round", {})
    settings = {"method": {"name": method}, "model": {"name": "mlr"}} | more | {"round": rounds}
    process(world_on_disk(tmp_path), scenario, settings, DEVICES)
