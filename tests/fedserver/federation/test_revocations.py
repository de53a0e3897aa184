"""Revocations, broken streams, refused updates and restarts at random moments: the other devices come to the end."""

import asyncio
import random
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from attune.common import aio
from attune.common.errors import CertificateRefused
from attune.common.protocol import SHARED_CHANGE
from attune.common.wire.files import TensorFile, write_tensors
from attune.fedserver.core.messages import OrderId, Phase
from attune.fedserver.core.records import Report
from attune.fedserver.federation.streams import Stream
from tests.fedserver.conftest import world_on_disk
from tests.fedserver.federation.test_coordinator import Server, hello, id_of, next_order, running

DEVICES, REVOKED, ROUNDS = "abcdef", 3, 5
METHODS: Mapping[str, Mapping[str, Any]] = {
    "fedavg": {},
    "fedmcsa": {},
    "fedtp": {"model": {"name": "transformer", "width": 8, "depth": 1, "heads": 2}},
    "buffered": {"method": {"name": "fedavg"}, "round": {"mode": "buffered", "buffer": 2}},
}
SLOW = (("executors", "disk"), ("lab", "aggregate"), ("ledger", "commit_round"), ("ledger", "put_record"))


async def hand_in(server: Server, order: OrderId, parts: tuple[str, ...], attempt: int) -> None:
    """Hand in the parts that the device is served, changed."""
    coordinator, kept = server.coordinator, {}
    served = (await coordinator.state.lab.serve([order.client]))[order.client]
    for part in parts:
        with TensorFile(server.blobs.open(served[part])) as file:
            changed = {name: tensor + 0.01 for name, tensor in file.items()}
        kept[part] = write_tensors(partial(server.blobs.create, f"uploads/{order.client}-{part}-{attempt}"), changed)
    row = Report(round=order.round, work=order.work, client=order.client, samples=10, accuracy_before=0.5, test_samples=4)
    await coordinator.state.executors.disk(coordinator.state.inbox.accept, order, row, kept)
    if not await coordinator.updates.report(order):
        await coordinator.state.executors.disk(coordinator.state.inbox.discard, order)


class Fleet:
    """Devices that carry out their orders, each in its own time. Half of them are revoked, in several processes."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._here = rng, set(DEVICES)
        self._to_revoke = rng.sample(DEVICES, REVOKED)
        self._at_work: list[asyncio.Task[None]] = []

    async def live(self, server: Server, *, last: bool) -> None:
        """Go through one process of the server: the last one to the end, others until a random moment."""
        self._at_work = []
        self._connect(server, *sorted(self._here))
        try:
            while self._to_revoke and (last or self._rng.random() < 0.6):
                await asyncio.sleep(self._rng.uniform(0, 0.15))
                await self._revoke(server, self._to_revoke.pop())
                await self._disturb(server, self._rng.choice(sorted(self._here)))
            if last:
                async with aio.timeout(30):
                    await server.coordinator.finished.wait()
                assert server.state.round.record.phase is Phase.DONE
            assert server.coordinator.error is None
        finally:
            for each in self._at_work:
                each.cancel()
            await asyncio.gather(*self._at_work, return_exceptions=True)

    def _connect(self, server: Server, *names: str) -> None:
        streams = [server.members.connect(name, hello(encodings=[SHARED_CHANGE])) for name in names]
        self._at_work += [asyncio.create_task(self._work(server, stream)) for stream in streams]

    async def _work(self, server: Server, stream: Stream) -> None:
        for attempt in range(10 * ROUNDS):
            try:
                order = await next_order(stream)
            except (AssertionError, CertificateRefused):  # the stream has ended
                return
            await asyncio.sleep(self._rng.uniform(0, 0.02))
            await hand_in(server, id_of(order), order.returns, attempt)

    async def _revoke(self, server: Server, name: str) -> None:
        self._here.remove(name)
        await server.ledger.update_device(name, revoked=True)
        await server.members.shut_out({name: CertificateRefused(f"{name} is revoked")})

    async def _disturb(self, server: Server, name: str) -> None:
        """Break the stream of a device, which comes back, or say that its update was refused."""
        stream = server.state.streams.get(name)
        if stream is not None and self._rng.random() < 0.5:
            stream.close()
            server.members.disconnect(stream)
            self._connect(server, name)
        else:
            await server.members.excuse(name, "its update was refused")


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("method", METHODS)
async def test_no_revocation_stops_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, seed: int) -> None:
    """Let steps on the disk, in the lab and in the ledger take random times, so that a revocation may fall into each."""
    rng = random.Random(seed)
    fleet = Fleet(rng)

    rounds = {
        "rounds": ROUNDS, "min_clients": len(DEVICES) - REVOKED, "evaluate_each_last": 0, "evaluate_every": 2,
        "deadline_s": 2.0,
    }  # fmt: skip
    settings = {"method": {"name": method}, "model": {"name": "mlr"}} | METHODS[method]
    settings |= {"round": rounds | METHODS[method].get("round", {})}
    for last in (False, False, True):
        async with running(world_on_disk(tmp_path), settings, DEVICES) as server:
            owners = {"executors": server.state.executors, "lab": server.state.lab, "ledger": server.ledger}
            for owner, name in SLOW:
                step = getattr(owners[owner], name)

                async def slow(*arguments: Any, step: Any = step) -> Any:
                    await asyncio.sleep(rng.uniform(0, 0.01))
                    return await step(*arguments)

                monkeypatch.setattr(owners[owner], name, slow)
            await fleet.live(server, last=last)
