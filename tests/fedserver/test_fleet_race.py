"""The legs of a race over the network: what ends one, what is kept of it, and what stays through a switch of runs."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attune.common import aio
from attune.common.errors import AttuneError, FederationFailed, HomeMismatch, PortInUse, SettingError
from attune.common.exchange.messages import Order
from attune.common.protocol import SCORES
from attune.fedserver import app, fleet_race, runs
from attune.fedserver.choosing.race_course import Race, RunLeg
from attune.fedserver.choosing.racing import ALONE
from attune.fedserver.core import planning
from attune.fedserver.core.messages import Phase, Record
from attune.fedserver.core.records import Report
from attune.fedserver.fleet_race import Turn
from attune.fedserver.home import ServerHome
from attune.fedserver.identity.admin import FederationAdmin
from attune.fedserver.ports.storage import HomeStorage
from attune.fedserver.stores.sqlite import SqliteLedger
from attune.simulation.memory import MemoryStorage
from tests.fedserver.conftest import World
from tests.fedserver.federation.test_coordinator import PROFILE, Server, hello, id_of, made, next_order
from tests.fedserver.view.test_runs import PLAN

GIVEN: Mapping[str, Any] = {
    "method": {"name": "auto"},
    "auto": {"candidates": ["fedavg"]},
    "model": {"name": "mlr"},
    "round": {"rounds": 3, "min_clients": 3, "take_back": 0.0, "grace_s": 0.2},
}
DEVICES = "abc"


def settings_of(name: str) -> dict[str, Any]:
    return {**fleet_race.first_settings(GIVEN), "method": {"name": name}}


RACE = Race(dict(GIVEN), 3, {name: settings_of(name) for name in (ALONE, "fedavg")})


def in_leg(turn: Turn, scenario: Callable[[Server], Awaitable[None]], storage: MemoryStorage | None = None) -> None:
    """Run `scenario` against the coordinator of a leg, whose devices are enrolled."""

    async def run() -> None:
        at = storage or MemoryStorage()
        settings = replace(planning.resolve(settings_of(turn.name)), until=turn.until)
        async with made(World(lambda: at, at), settings, DEVICES) as server:
            await server.coordinator.start()
            await scenario(server)

    aio.run(run())


async def ended(turn: Turn, server: Server) -> AttuneError | None:
    async with aio.timeout(30):
        return await fleet_race.over(turn, server.coordinator)


async def end(turn: Turn, server: Server) -> Race:
    """Wait for the end of a leg, and return the race after it."""
    error = await ended(turn, server)
    return await fleet_race.end_leg(server.ledger, turn, server.coordinator, error)


def connect(server: Server, *names: str) -> list[Any]:
    return [server.members.connect(name, hello(encodings=[SCORES])) for name in names]


async def score(server: Server, order: Order) -> None:
    nats = {"likelihood_kept": -1.0, "likelihood_closed_form": 0.5, "likelihood_closed_form_error": 0.25}
    row = Report(round=1, work="evaluate", client=id_of(order).client, **nats)
    server.state.inbox.accept(id_of(order), row, {})
    await server.coordinator.updates.report(id_of(order))


def test_the_data_of_the_devices_in_the_plan_say_who_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have left since, and a device that came while the plan was made has no say: its label looks like "0"."""
    turn = Turn(Race(dict(GIVEN), 3), ALONE, 0, {})

    async def scenario(server: Server) -> None:
        start = server.state.lab.start

        async def started(*arguments: Any) -> Any:
            odd = msgspec.json.encode(msgspec.structs.replace(PROFILE, labels=["\uff10"]))
            server.members.connect("late", msgspec.structs.replace(hello(encodings=[SCORES]), profile_json=odd))
            return await start(*arguments)

        monkeypatch.setattr(server.state.lab, "start", started)
        streams = connect(server, *DEVICES)
        async with aio.timeout(30):
            while server.state.plan is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for stream in streams:
            stream.close()
            server.members.disconnect(stream)
        assert list((await end(turn, server)).entrants) == [ALONE, "fedavg"]

    in_leg(turn, scenario)


@pytest.mark.parametrize("name", [ALONE, "fedavg"])
def test_a_candidate_with_which_most_devices_cannot_train_is_left_out(name: str) -> None:
    race = RACE if name == ALONE else RACE.after(RunLeg(ALONE, 1, dict.fromkeys(DEVICES, -1.0)))
    turn = Turn(race, name, 1, {})

    async def scenario(server: Server) -> None:
        orders = [(stream.name, await next_order(stream)) for stream in connect(server, *DEVICES)]
        device, order = orders[0]
        await server.members.trouble(device, order.id, "the loss is not finite")
        waits = asyncio.create_task(fleet_race.over(turn, server.coordinator))
        await asyncio.sleep(3 * fleet_race.LOOK_S)
        assert not waits.done(), "one device ends nothing"
        device, order = orders[1]
        await server.members.trouble(device, order.id, "the loss is not finite")
        if name == ALONE:
            await asyncio.sleep(3 * fleet_race.LOOK_S)
            assert not waits.done(), "without training alone there is no race"
            waits.cancel()
            return
        after = await fleet_race.end_leg(server.ledger, turn, server.coordinator, await waits)
        left_out = after.course().result.left_out
        assert left_out == {"fedavg": "it failed before round 1 was over: 2 of 3 devices could not train with it"}

    in_leg(turn, scenario)


def test_an_evaluation_to_which_nobody_came_is_made_again() -> None:
    turn, storage = Turn(RACE, ALONE, 1, {}), MemoryStorage()

    async def first(server: Server) -> None:
        streams = connect(server, *DEVICES)
        for stream in streams:
            await server.answer(id_of(await next_order(stream)))
        for stream in streams:
            assert (await next_order(stream)).work == "evaluate"
            stream.close()
            server.members.disconnect(stream)
        assert await end(turn, server) == RACE

    async def second(server: Server) -> None:
        for stream in connect(server, *DEVICES):
            order = await next_order(stream)
            assert order.id == f"evaluate-1-{stream.name}"
            await score(server, order)
        scored = (dict.fromkeys(DEVICES, nats) for nats in (-1.0, 0.5, 0.25))
        assert (await end(turn, server)).legs == (RunLeg(ALONE, 1, *scored),)

    in_leg(turn, first, storage)
    in_leg(turn, second, storage)


def test_the_scores_of_a_device_that_was_revoked_do_not_count() -> None:
    turn = Turn(RACE, ALONE, 1, {})

    async def scenario(server: Server) -> None:
        streams = connect(server, *DEVICES)
        for stream in streams:
            await server.answer(id_of(await next_order(stream)))
        for stream in streams:
            await score(server, await next_order(stream))
        assert await ended(turn, server) is None
        await server.ledger.update_device("b", revoked=True)
        (leg,) = (await end(turn, server)).legs
        assert (leg.scores, leg.gains, leg.errors) == tuple(dict.fromkeys("ac", nats) for nats in (-1.0, 0.5, 0.25))

    in_leg(turn, scenario)


def test_an_error_that_is_not_the_candidates_stops_the_server() -> None:
    turn = Turn(RACE.after(RunLeg(ALONE, 1, dict.fromkeys(DEVICES, -1.0))), "fedavg", 1, {})

    async def scenario(server: Server) -> None:
        for error, is_of_candidate in ((FederationFailed("it diverged"), True), (HomeMismatch("another disk"), False)):
            await server.coordinator._fail(error)
            if is_of_candidate:
                assert await ended(turn, server) is error
            else:
                with pytest.raises(HomeMismatch, match="another disk"):
                    await ended(turn, server)

    in_leg(turn, scenario)


def test_a_first_start_without_its_port_binds_the_home_to_no_race(tmp_path: Path) -> None:
    home = ServerHome(tmp_path / "server")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = app.ServerOptions(home.path, "127.0.0.1", taken.getsockname()[1], False, lambda line: None)
        with pytest.raises(PortInUse):
            aio.run(app.run(options, dict(GIVEN)))
    assert home.snapshot().race is None


class RacingHome:
    """Home whose present run is that of local after one round of a race."""

    def __init__(self, path: Path, record: Record) -> None:
        self.home = ServerHome(path / "server")
        self.home.create()

        async def write(storage: HomeStorage) -> None:
            await storage.ledger.begin_run(ALONE, settings_of(ALONE))
            await runs.tidy(storage, await storage.ledger.snapshot())
            await storage.ledger.commit_round(record, [], [], {}, PLAN)
            await storage.ledger.set_race(RACE)

        self.do(write)

    def do(self, work: Callable[[HomeStorage], Coroutine[Any, Any, Any]]) -> Any:
        async def run() -> Any:
            async with self.home.open() as storage:
                return await work(storage)

        return aio.run(run())

    def switch(self, name: str) -> None:
        self.do(lambda storage: runs.switch(self.home, storage, name, settings_of(name), "server"))

    @property
    def record(self) -> Record:
        return self.home.snapshot().record


def test_a_pause_stays_through_a_switch_of_runs_and_does_not_come_back_with_one(tmp_path: Path) -> None:
    racing = RacingHome(tmp_path, Record(round=1, paused=True))
    racing.switch("fedavg")
    assert racing.record == Record(paused=True)
    racing.do(lambda storage: FederationAdmin(storage.ledger, "ada").pause_record(False))
    racing.switch(ALONE)
    assert racing.record == Record(round=1), "it was resumed since it was put aside"


def test_a_race_can_be_given_up_before_its_candidate_has_closed_a_round(tmp_path: Path) -> None:
    racing = RacingHome(tmp_path, Record(round=1))
    racing.switch("fedavg")
    racing.do(lambda storage: storage.ledger.commit_round(Record(phase=Phase.TRAINING), [], [], {}, PLAN))
    with pytest.raises(HomeMismatch, match=r"a race of methods is under way.*fedserver run stop"):
        runs.begin(racing.home, "second", {}, "ada")
    assert runs.stop(racing.home, "ada") == 0
    with pytest.raises(HomeMismatch, match=r"no round of the run fedavg is closed.*fedserver run new"):
        runs.stop(racing.home, "ada")
    runs.begin(racing.home, "second", {}, "ada")
    found = racing.home.snapshot()
    assert (found.run, found.race, found.record) == ("second", None, Record())


@pytest.mark.parametrize("write", ["begin_run", "set_race", "set_commitments", "end_cleanup"])
def test_a_new_run_after_a_race_is_begun_or_not_wherever_it_is_killed(tmp_path, monkeypatch, write: str) -> None:
    legs = [RunLeg(name, until, {"a": -1.0}) for until in (1, 2, 3) for name in (ALONE, "fedavg")]
    racing = RacingHome(tmp_path, Record(round=3, phase=Phase.DONE))
    racing.do(lambda storage: storage.ledger.set_race(msgspec.structs.replace(RACE, legs=tuple(legs))))

    class Killed(BaseException):
        pass

    def die(*arguments: Any, **more: Any) -> Any:
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(SqliteLedger, write, die)
        runs.begin(racing.home, "second", {}, "ada")
    before = racing.home.snapshot().run
    racing.do(lambda storage: fleet_race.turn_of(racing.home, storage, {}))
    assert racing.home.snapshot().run == before


def test_a_candidate_has_settings_of_all_sections_as_in_a_simulation() -> None:
    candidates = {"fedprox": {"mu": 0.5, "train.lr": 0.25}, ALONE: {"train.lr": 0.125}}
    assert fleet_race.first_settings({**GIVEN, "auto": {"candidates": candidates}})["method"] == {"name": ALONE}


@pytest.mark.parametrize("named", ["round.rounds", "round.mode", "train.score_after", "train.validation", "privacy.unit"])
def test_what_makes_candidates_comparable_is_the_same_for_all(named: str) -> None:
    with pytest.raises(SettingError, match=rf"{named} of fedavg must be that of the race"):
        fleet_race.first_settings({**GIVEN, "auto": {"candidates": {"fedavg": {named: 1}}}})


def test_buffered_rounds_have_no_race() -> None:
    """At a rung only those devices would score that are between two orders, for each candidate others."""
    with pytest.raises(SettingError, match=r"round\.mode.*--method auto compares"):
        fleet_race.first_settings({**GIVEN, "round": {"rounds": 3, "mode": "buffered"}})
