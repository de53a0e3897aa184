"""A race whose devices come, go, fail and are revoked, and whose server restarts, at random moments: it comes to its end."""

import asyncio
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attune.common import aio
from attune.common.errors import CertificateRefused
from attune.common.protocol import SCORES
from attune.fedserver import fleet_race
from attune.fedserver.choosing.race_course import Race
from attune.fedserver.core import planning
from attune.fedserver.core.messages import Phase
from attune.fedserver.core.records import Report
from attune.fedserver.executors import Executors
from attune.fedserver.federation.coordinator import Coordinator
from attune.fedserver.federation.federation_state import FederationState
from attune.fedserver.federation.streams import Stream
from attune.fedserver.home import ServerHome
from attune.fedserver.lab.thread import ThreadLab
from attune.fedserver.ports.storage import HomeStorage
from attune.fedserver.view.status import status
from tests.fedserver.federation.test_coordinator import Server, hello, id_of, next_order
from tests.fedserver.federation.test_revocations import hand_in

DEVICES, REVOKED = "abcdef", 2
GIVEN: Mapping[str, Any] = {
    "method": {"name": "auto"},
    "auto": {"candidates": ["fedavg", "fedper"]},
    "model": {"name": "dnn", "hidden": [4]},
    "round": {"rounds": 4, "min_clients": 3, "grace_s": 0.3, "deadline_s": 3.0},
}


class Fleet:
    """Devices that carry out orders, each in its own time, and the operator."""

    def __init__(self, seed: int) -> None:
        self.rng, self.here = random.Random(seed), set(DEVICES)
        self.to_revoke = self.rng.sample(DEVICES, REVOKED)
        self.silent = self.rng.choice(DEVICES)  # discloses no scores
        self.attempt = 0
        self.tasks: list[asyncio.Task[None]] = []

    async def live(self, server: Server) -> None:
        """Connect, and disturb the server until it is cancelled."""
        self.tasks = []
        try:
            self.connect(server, *sorted(self.here))
            while True:
                await asyncio.sleep(self.rng.uniform(0, 0.4))
                await self.disturb(server)
        finally:
            for each in self.tasks:
                each.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)

    def connect(self, server: Server, *names: str) -> None:
        for name in names:
            stream = server.members.connect(name, hello(encodings=[SCORES]))
            self.tasks.append(asyncio.create_task(self.work(server, stream)))

    async def work(self, server: Server, stream: Stream) -> None:
        while True:
            try:
                order = await next_order(stream)
            except (AssertionError, CertificateRefused):
                return
            await asyncio.sleep(self.rng.uniform(0, 0.05))
            self.attempt += 1
            if self.rng.random() < 0.1:
                await server.members.trouble(stream.name, order.id, "no memory")
                continue
            if order.work == "train":
                await hand_in(server, id_of(order), order.returns, self.attempt)
                continue
            nats = None if stream.name == self.silent else self.rng.choice([-1e100, -5.0, -4.0, 1e100])
            row = Report(round=order.round, work="evaluate", client=stream.name, samples=10, likelihood_kept=nats)
            await server.state.executors.disk(server.state.inbox.accept, id_of(order), row, {})
            if not await server.coordinator.updates.report(id_of(order)):
                await server.state.executors.disk(server.state.inbox.discard, id_of(order))

    async def disturb(self, server: Server) -> None:
        name, chance = self.rng.choice(sorted(self.here)), self.rng.random()
        if chance < 0.1 and self.to_revoke:
            name = self.to_revoke.pop()
            self.here.remove(name)
            await server.ledger.update_device(name, revoked=True)
            await server.members.shut_out({name: CertificateRefused(f"{name} is revoked")})
        elif chance < 0.5:
            if (stream := server.state.streams.get(name)) is not None:
                stream.close()
                server.members.disconnect(stream)
                await asyncio.sleep(self.rng.choice([0.0, 0.5]))
            if server.state.streams.get(name) is None:
                self.connect(server, name)
        elif chance < 0.6:
            await server.coordinator.pause(True)
            await asyncio.sleep(0.1)
            await server.coordinator.pause(False)


async def leg(home: ServerHome, storage: HomeStorage, fleet: Fleet) -> Race | None:
    """Serve one leg, or until a random moment. Return the race once its winner's run is over."""
    turn = await fleet_race.turn_of(home, storage, GIVEN)
    assert turn is not None
    if fleet.rng.random() < 0.1:
        return None  # killed before it served
    snapshot = await storage.ledger.snapshot()
    merged = planning.reconcile(snapshot.overrides, turn.overrides)
    settings, executors = replace(planning.resolve(merged), until=turn.until), Executors()
    await storage.ledger.set_race(turn.race)
    await storage.ledger.set_overrides(merged)
    lab = ThreadLab(storage.blobs, executors)
    coordinator = Coordinator(FederationState(storage, lab, settings, executors), "fed")
    server = Server(coordinator, storage)
    await server.enrol(*DEVICES)
    try:
        await coordinator.start()
        living = asyncio.create_task(fleet.live(server))
        try:
            if turn.until is None:
                async with aio.timeout(60):
                    await coordinator.finished.wait()
                found = await storage.ledger.snapshot()
                assert found.record.phase is Phase.DONE and found.plan is not None and coordinator.error is None
                assert found.plan.method == turn.race.course().result.chosen
                assert status(found, set(), None, [])["auto"]["trains"] is None
                return turn.race
            ends = asyncio.create_task(fleet_race.over(turn, coordinator))
            patience = fleet.rng.uniform(0, 3) if fleet.rng.random() < 0.2 else 60
            await asyncio.wait([ends, living], timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if living.done():
                living.result()
            if not ends.done():
                assert patience < 60, f"{turn} hangs: {coordinator.state.round}"
                ends.cancel()
                return None
        finally:
            living.cancel()
            await asyncio.gather(living, return_exceptions=True)
    finally:
        await coordinator.stop()
        executors.shutdown()
    await fleet_race.end_leg(storage.ledger, turn, coordinator, ends.result())
    status(await storage.ledger.snapshot(), set(), None, [])
    return None


@pytest.mark.parametrize("seed", range(2))
def test_a_race_comes_to_its_end_whatever_its_fleet_does(tmp_path: Path, seed: int) -> None:
    home, fleet = ServerHome(tmp_path / "server"), Fleet(seed)
    home.create()

    async def process() -> Race | None:
        async with home.open() as storage:
            return await leg(home, storage, fleet)

    for _ in range(60):
        if (race := aio.run(process())) is not None:
            break
    assert race is not None and race.is_over
