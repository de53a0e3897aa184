"""The coordinator: the order of its durable steps, and the waits for them, in memory and on disk, without a network."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from attune.common import aio
from attune.common.errors import DiskFull, HomeMismatch, LedgerBusy, SettingError
from attune.common.exchange.messages import Hello, Order
from attune.common.plan import Columns, Profile
from attune.common.protocol import GIVEN_MODEL, NOISE, SCORES
from attune.common.wire.files import TensorFile, write_tensors
from attune.fedserver.core.messages import OrderId, Phase
from attune.fedserver.core.planning import ResolvedSettings, resolve
from attune.fedserver.core.records import Report
from attune.fedserver.executors import Executors
from attune.fedserver.federation import steps
from attune.fedserver.federation.coordinator import Coordinator
from attune.fedserver.federation.federation_state import FederationState
from attune.fedserver.federation.members import Members
from attune.fedserver.federation.streams import Stream
from attune.fedserver.identity.registrar import Caller
from attune.fedserver.lab.thread import ThreadLab
from attune.fedserver.ports.blobs import Blobs, Damaged
from attune.fedserver.ports.ledger import Certificate, Ledger, Token
from attune.fedserver.ports.storage import Storage
from attune.fedserver.rpc.auth import ABOUT_ORDERS, Auth
from attune.fedserver.rpc.connection_limiter import Bounds, ConnectionLimiter
from attune.fedserver.rpc.server import watch
from attune.fedserver.view.homes import render_status
from attune.fedserver.view.status import status
from tests.fedserver.conftest import World, world_on_disk

PROFILE = Profile("tabular", (3,), [0, 1], 10, 4)
SETTINGS = {
    "method": {"name": "local"},
    "model": {"name": "mlr"},
    "round": {"rounds": 2, "min_clients": 2, "evaluate_each_last": 0},
}
FEDAVG = {"method": {"name": "fedavg"}, "model": {"name": "mlr"}, "round": {"rounds": 2, "min_clients": 2}}


def hello(inline_bytes: int = 0, encodings: Sequence[str] = ()) -> Hello:
    return Hello("test", msgspec.json.encode(PROFILE), tuple(encodings), inline_bytes)


@dataclass
class Server:
    coordinator: Coordinator
    storage: Storage

    @property
    def state(self) -> FederationState:
        return self.coordinator.state

    @property
    def members(self) -> Members:
        return self.coordinator.members

    @property
    def ledger(self) -> Ledger:
        return self.storage.ledger

    @property
    def blobs(self) -> Blobs:
        return self.storage.blobs

    async def enrol(self, *names: str) -> None:
        for name in names:
            if await self.ledger.device(name) is None:
                await self.ledger.enrol(name, name, Certificate(name, name, "device", 1e12), 0.0)

    def connect(self, *names: str) -> list[Stream]:
        return [self.members.connect(name, hello()) for name in names]

    async def answer(self, order: OrderId) -> bool:
        row = Report(round=order.round, work=order.work, client=order.client, samples=10, accuracy_before=0.5, test_samples=4)
        self.coordinator.state.inbox.accept(order, row, {})
        return await self.coordinator.updates.report(order)

    async def closed(self, rounds: int) -> None:
        async with aio.timeout(20):
            while (await self.ledger.snapshot()).record.round < rounds:  # noqa: ASYNC110 (the ledger tells nobody)
                await asyncio.sleep(0.01)


@asynccontextmanager
async def made(world: World, settings: ResolvedSettings, devices: str, *, one_owner: bool = False) -> AsyncIterator[Server]:
    """Return a server over the present state with these devices, which has not started. It ends with the context."""
    storage, executors = world.opened(), Executors()
    state = FederationState(storage, ThreadLab(storage.blobs, executors), settings, executors)
    coordinator = Coordinator(state, "federation", one_owner=one_owner)
    server = Server(coordinator, storage)
    await server.enrol(*devices)
    try:
        yield server
    finally:
        await coordinator.stop()
        executors.shutdown()
        await storage.ledger.close()


@asynccontextmanager
async def running(
    world: World, settings: Mapping[str, Any] = SETTINGS, devices: str = "ab", *, one_owner: bool = False
) -> AsyncIterator[Server]:
    """Return a coordinator over the present state that has started, as one process would."""
    async with made(world, resolve(settings), devices, one_owner=one_owner) as server:
        await server.coordinator.start()
        yield server


async def next_order(stream: Stream) -> Order:
    async with aio.timeout(60):
        while (message := await stream.next()) is not None:
            if isinstance(message, Order):
                return message
    raise AssertionError("the stream ended without an order")


def id_of(order: Order) -> OrderId:
    return OrderId.parse(order.id, order.id.split("-", 2)[2])


async def first_orders(server: Server) -> list[OrderId]:
    return [id_of(await next_order(stream)) for stream in server.connect("a", "b")]


async def test_a_device_that_cannot_score_what_it_would_keep_is_refused_by_name(world: World) -> None:
    settings = SETTINGS | {"train": {"score_after": [1]}}

    async with running(world, settings) as server:
        with pytest.raises(SettingError, match=r"old cannot score what it would keep .*: update fedclient"):
            server.members.connect("old", hello())
        server.members.connect("a", hello(encodings=[SCORES]))


async def test_a_device_that_would_blend_a_given_model_is_refused_by_name(world: World) -> None:
    settings = SETTINGS | {"method": {"name": "fedavg"}, "round": {"given": "sha256:0", "min_clients": 2}}
    async with running(world, settings) as server:
        with pytest.raises(SettingError, match=r"old cannot evaluate a given model .*: update fedclient"):
            server.members.connect("old", hello())
        server.members.connect("a", hello(encodings=[GIVEN_MODEL]))


async def test_an_evaluation_begins_with_the_results_of_the_last_also_after_a_restart(world: World) -> None:
    """Expect no prior after round 1; after round 2 it has the other device's result: (1 + 1) / (1 + 2).

    One device answers before the restart with another result, which is for the next evaluation.
    """
    settings = SETTINGS | {"round": {"rounds": 2, "min_clients": 2, "evaluate_each_last": 2}}

    async def found(server: Server, order: Order, best: float) -> None:
        likelihood = {"likelihood_common": -300.0, "likelihood_local": best}
        row = Report(round=order.round, work="evaluate", client=id_of(order).client, samples=10, **likelihood)
        server.state.inbox.accept(id_of(order), row, {})
        await server.coordinator.updates.report(id_of(order))

    async with running(world, settings, one_owner=True) as server:
        streams = server.connect("a", "b")
        for stage in ("train", "evaluate", "train"):
            orders = [await next_order(stream) for stream in streams]
            assert [(order.work, order.prior) for order in orders] == [(stage, {})] * 2
            for order in orders:
                await (found(server, order, -1.0) if stage == "evaluate" else server.answer(id_of(order)))
        orders = [await next_order(stream) for stream in streams]
        assert all(order.prior == pytest.approx({"common": 1 / 3, "local": 2 / 3}) for order in orders)
        await found(server, orders[0], -900.0)
    async with running(world, settings, one_owner=True) as server:
        [stream] = server.connect("b")
        order = await next_order(stream)
        assert (order.id, order.prior) == ("evaluate-2-b", pytest.approx({"common": 1 / 3, "local": 2 / 3}))


def held_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Make the lab wait with aggregation until this event is set."""
    go_on, aggregate = threading.Event(), server.state.lab.aggregate

    async def waits(*arguments: Any) -> Any:
        await asyncio.to_thread(go_on.wait, 20)
        return await aggregate(*arguments)

    monkeypatch.setattr(server.state.lab, "aggregate", waits)
    return go_on


async def test_devices_connect_while_the_lab_takes_up_its_state_and_are_answered_after_it(world: World, monkeypatch) -> None:
    """Let a restarted server accept connections first: slow steps, such as torch's import, run beside the handshakes."""
    async with running(world) as server:
        await first_orders(server)
    async with made(world, resolve(SETTINGS), "ab") as server:
        coordinator, go_on = server.coordinator, asyncio.Event()
        start = coordinator.state.lab.start

        async def waits(*arguments: Any) -> Any:
            await go_on.wait()
            return await start(*arguments)

        monkeypatch.setattr(coordinator.state.lab, "start", waits)
        resumed = coordinator.resume(await coordinator.state.restore())
        streams = server.connect("a", "b")
        with pytest.raises(TimeoutError):
            async with aio.timeout(0.1):
                await asyncio.shield(resumed)
        assert not coordinator.ready.is_set() and coordinator.state.round.record.round == 0
        go_on.set()
        await resumed
        assert [(await next_order(stream)).round for stream in streams] == [1, 1]


async def test_calls_about_orders_wait_until_the_orders_are_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def known(self: Auth, method: str, context: object) -> Caller:
        return Caller("device", "a", "ab")

    async def answer(request: object, context: object) -> str:
        return "answered"

    monkeypatch.setattr(Auth, "check", known)
    ready, context = asyncio.Event(), SimpleNamespace(peer=lambda: "ipv4:127.0.0.1:1")
    nobody, limiter = cast(Any, None), ConnectionLimiter(Bounds.of(256), 10.0)
    auth = Auth(nobody, steps.Troubles(), nobody, limiter, ready)
    assert await auth._wrap("/attune.v1.Federation/Connect", answer, None)(None, context) == "answered"
    early = [asyncio.create_task(auth._wrap(method, answer, None)(None, context)) for method in ABOUT_ORDERS]
    _, pending = await asyncio.wait(early, timeout=0.1)
    assert pending == set(early), "an order that is not out yet would be called closed, and its update dropped"
    ready.set()
    assert await asyncio.gather(*early) == ["answered"] * len(early)


async def test_a_round_closes_although_the_one_who_reported_last_has_gone(world: World, monkeypatch) -> None:
    async with running(world) as server:
        first, second = await first_orders(server)
        go_on = held_up(server, monkeypatch)
        assert await server.answer(first)
        last = asyncio.create_task(server.answer(second))
        await asyncio.sleep(0)
        last.cancel()
        await asyncio.gather(last, return_exceptions=True)
        go_on.set()
        await server.closed(1)


async def test_nobody_waits_for_the_aggregation_and_who_comes_meanwhile_is_welcome(world: World, monkeypatch) -> None:
    async with running(world) as server:
        orders = await first_orders(server)
        go_on = held_up(server, monkeypatch)
        async with aio.timeout(10):
            assert [await server.answer(order) for order in orders] == [True, True]
            assert server.state.round.record.phase is Phase.AGGREGATING
            assert await server.answer(orders[0]), "sending again is answered as before"
            [again] = server.connect("a")
            await server.state.turns.step(asyncio.sleep, 0)  # the welcome was queued before
            assert "a" in server.state.round.connected
        go_on.set()
        assert (await next_order(again)).round == 2


async def test_devices_that_come_back_at_once_get_their_orders_in_one_step(world: World, monkeypatch) -> None:
    """Expect one step for the cohort, because served values are made for all of it; a step each would take quadratic time."""
    opened: list[tuple[str, ...]] = []

    async with running(world) as server:
        await first_orders(server)
        original = server.coordinator._orders.open

        async def counted(*arguments: Any) -> None:
            opened.append(tuple(arguments[-1]))
            await original(*arguments)

        monkeypatch.setattr(server.coordinator._orders, "open", counted)
        again = server.connect("a", "b")
        assert [(await next_order(stream)).round for stream in again] == [1, 1]
    assert opened == [("a", "b")]


@pytest.mark.parametrize("error", [LedgerBusy("locked"), DiskFull("no room"), OSError(24, "Too many open files")])
@pytest.mark.parametrize("step", ["lab.aggregate", "ledger.commit_round", "ledger.put_record"])
async def test_what_can_pass_is_tried_again_and_said(world: World, monkeypatch, error: Exception, step: str) -> None:
    monkeypatch.setattr(steps, "FIRST_DELAY_S", 0.01)
    said: list[str] = []

    async with running(world) as server:
        orders = await first_orders(server)
        owner, name = step.split(".")
        target = {"lab": server.state.lab, "ledger": server.ledger}[owner]
        original, left = getattr(target, name), [3]

        async def fails(*arguments: Any, **more: Any) -> Any:
            said.extend(server.state.troubles.lines)
            if left[0]:
                left[0] -= 1
                raise error
            return await original(*arguments, **more)

        monkeypatch.setattr(target, name, fails)
        for order in orders:
            await server.answer(order)
        await server.closed(1)
        assert not server.coordinator.finished.is_set()
        assert server.state.troubles.lines == []
        assert any(str(error) in line for line in said), said


async def test_a_ledger_that_is_lost_while_devices_come_and_answer_is_waited_for(world: World, monkeypatch) -> None:
    """Before, reading who is known failed the whole federation, which then needed a restart."""
    monkeypatch.setattr(steps, "FIRST_DELAY_S", 0.01)

    async with running(world) as server:
        original, asked = server.ledger.devices, list[object]()

        async def fails(*arguments: Any) -> Any:
            asked.append(arguments)
            if len(asked) % 3 == 1:  # so that a step with two such calls passes, too
                raise LedgerBusy("lost")
            return await original(*arguments)

        monkeypatch.setattr(server.ledger, "devices", fails)
        for order in await first_orders(server):
            await server.answer(order)
        await server.closed(1)
        assert server.coordinator.error is None and len(asked) > 3
        async with aio.timeout(20):
            while server.state.troubles.lines:  # noqa: ASYNC110 (the next round may wait for the ledger, too)
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("step", ["lab.aggregate", "ledger.put_record"])
async def test_a_step_that_fails_has_not_happened_and_a_restart_tries_it_again(world: World, monkeypatch, step: str) -> None:
    """The updates are accepted, because a late answer would delete them from the inbox."""
    async with running(world) as server:
        orders = await first_orders(server)

        async def broken(*_: Any) -> Any:
            raise ZeroDivisionError("by zero")

        owner, name = step.split(".")
        monkeypatch.setattr({"lab": server.state.lab, "ledger": server.ledger}[owner], name, broken)
        assert [await server.answer(order) for order in orders] == [True, True]
        async with aio.timeout(20):
            await server.coordinator.finished.wait()
        record = server.state.round.record
        assert (record.phase, record.round) == (Phase.FAILED, 0)
        assert "by zero" in record.reason
        assert owner == "ledger" or (await server.ledger.snapshot()).record == record
        assert await server.answer(orders[0]), "it is in the inbox, and counts"
    monkeypatch.undo()
    async with running(world) as server:
        await server.closed(1)
        rows = (await server.ledger.snapshot()).rows
        assert [(row.round, row.client) for row in rows] == [(1, "a"), (1, "b")]
        assert [order.round for order in await first_orders(server)] == [2, 2]


async def test_damage_found_in_mid_run_ends_the_server_and_a_restored_file_continues(world: World, monkeypatch) -> None:
    """Damage a slot that no round has touched for long: it is read for the first time when its device is served."""
    async with running(world) as server:
        orders = await first_orders(server)

        async def broken(*_: Any) -> Any:
            raise Damaged("state/attended.client~a.1.safetensors is damaged")

        monkeypatch.setattr(server.state.lab, "serve", broken)
        for order in orders:
            await server.answer(order)
        async with aio.timeout(20):
            await server.coordinator.unusable.wait()
        assert server.coordinator.error is not None
        assert (server.coordinator.error.exit_code, str(server.coordinator.error)) == (
            4,
            "state/attended.client~a.1.safetensors is damaged",
        )
    monkeypatch.undo()
    async with running(world) as server:
        assert [order.round for order in await first_orders(server)] == [2, 2]


async def test_the_operator_is_told_who_is_passed_over_until_it_is_asked_again(world: World) -> None:
    """Let two orders in a row expire; then a progress report shows that the device works."""

    async def note(server: Server) -> str:
        device = await server.ledger.device("b")
        assert device is not None
        return device.note

    async with running(world, SETTINGS | {"round": {"rounds": 9, "min_clients": 1, "quorum": 1, "deadline_s": 1.0}}) as server:
        answering, hanging = server.connect("a", "b")
        for _ in range(3):  # the first round opens before "b" joins
            await server.answer(id_of(await next_order(answering)))
        last = await next_order(answering)  # from the first round that does not ask the device that hangs
        assert "not asked" in await note(server)
        assert "2 orders in a row" in await note(server)
        assert ((await next_order(hanging)).round, last.round) == (2, 4)
        assert server.state.round.record.devices == ("a",)
        server.members.disconnect(hanging)
        server.connect("b")
        await server.answer(id_of(last))
        assert (await next_order(answering)).round == 5
        assert server.state.round.record.devices == ("a", "b")
        assert await note(server) == ""


async def test_a_round_that_refused_updates_keep_from_its_quorum_says_what_to_do(world: World) -> None:
    """The quorum is all devices. One of them is refused in the first round and again after it was asked anew."""
    rounds = SETTINGS["round"] | {"min_clients": 3, "deadline_s": 1.0}
    async with running(world, SETTINGS | {"round": rounds}, "abc") as server:
        streams = server.connect("a", "b", "c")
        orders = [id_of(await next_order(stream)) for stream in streams]
        for order in orders[:2]:
            await server.answer(order)
        assert server.state.troubles.lines == []
        for number in range(2):
            if number:
                await next_order(streams[2])
                assert server.state.troubles.lines == [], "it may bring a good one now"
            await server.members.excuse("c", "update refused: c's update is not finite")
            [line] = server.state.troubles.lines
            assert "round 1 needs 3 updates and cannot get more than 2: c failed or sent an update that was refused" in line
            assert "revoke" in line and "round.quorum" in line
        await server.state.turns.step(server.coordinator.members.expel, "c")
        await server.closed(1)
        assert server.state.troubles.lines == []


@pytest.mark.parametrize(("bound", "one_owner", "warned"), [(3.0, False, True), (1.0, False, False), (3.0, True, False)])
async def test_the_start_says_as_how_many_devices_liars_count(
    world: World, caplog: pytest.LogCaptureFixture, bound: float, one_owner: bool, warned: bool
) -> None:
    async with running(world, SETTINGS | {"method": {"name": "fedavg", "bound_change": bound}}, one_owner=one_owner) as server:
        for stream in server.connect("a", "b"):
            await next_order(stream)
    assert ("1 hostile of 2 devices can count as 3" in caplog.text) == warned


@pytest.mark.parametrize(("second", "alike"), [("one", True), ("two", False)])
async def test_the_status_and_the_log_name_a_fleet_of_one_token(world: World, caplog, second: str, alike: bool) -> None:
    async with running(world, SETTINGS | {"round": SETTINGS["round"] | {"min_clients": 3}}, "") as server:
        for name, token in (("x", "one"), ("y", "one"), ("z", second)):
            if await server.ledger.token(token) is None:
                await server.ledger.add_token(Token(token, b"", 9, 1e12, "operator", id=token))
            await server.ledger.enrol(name, name, Certificate(name, name, "device", 1e12), 0.0, token)
        for stream in server.connect("x", "y", "z"):
            await next_order(stream)
        text = "all 3 devices joined with one token"
        shown = status(await server.ledger.snapshot(), set())
        assert (text in caplog.text, text in render_status(shown), bool(shown["one_token"])) == (alike, alike, alike)


async def test_an_update_that_comes_while_the_round_closes_is_late_and_leaves_no_row(world: World, monkeypatch) -> None:
    async with running(world, {**SETTINGS, "round": {"rounds": 2, "min_clients": 2, "quorum": 1}}) as server:
        first, second = await first_orders(server)
        go_on = held_up(server, monkeypatch)
        await server.members.excuse("b", "no memory")
        assert await server.answer(first)
        assert not await server.answer(second)
        go_on.set()
        await server.closed(1)
        assert [(row.round, row.client) for row in (await server.ledger.snapshot()).rows] == [(1, "a")]


async def test_a_newer_stream_of_a_device_takes_its_orders_over(world: World) -> None:
    async with running(world) as server:
        old, _ = server.connect("a", "b")
        order = await next_order(old)
        [new] = server.connect("a")
        assert (await next_order(new)).id == order.id
        server.members.disconnect(old)
        await server.state.turns.step(asyncio.sleep, 0)
        device = await server.ledger.device("a")
        assert device is not None and device.connected, "the end of the old stream changes nothing"
        assert "two processes use its identity" in device.note
        server.members.disconnect(new)
        await server.state.turns.step(asyncio.sleep, 0)
        device = await server.ledger.device("a")
        assert device is not None and not device.connected


async def test_a_device_never_sampled_is_fitted_after_the_end_to_what_it_is_served(world: World) -> None:
    """Use a device that starts from its own state, while its untrained tensors must be the federation's."""
    rounds = {"rounds": 1, "min_clients": 2, "clients": 1, "train": "all", "adapt_rounds": 1}
    settings = {"method": {"name": "fedper"}, "model": {"name": "dnn"}, "round": rounds}

    async with running(world, settings) as server:
        coordinator = server.coordinator
        streams = dict(zip("ab", server.connect("a", "b"), strict=True))
        for _ in ("train", "evaluate"):
            for name, stream in streams.items():
                order = await next_order(stream)
                served = (await coordinator.state.lab.serve([name]))[name]["shared"]
                row = Report(round=order.round, work=order.work, client=name, samples=10, accuracy_before=0.5, test_samples=4)
                part = server.blobs.put(f"uploads/{name}", server.blobs.get(served.name))
                coordinator.state.inbox.accept(id_of(order), row, {"shared": part} if order.returns else {})
                assert await coordinator.updates.report(id_of(order))
            await server.closed(1)
        [newcomer] = {"a", "b"} - set(coordinator.state.round.record.last_cohort)
        order = await next_order(streams[newcomer])
        assert (order.id, order.trains, order.returns) == (f"train-2-{newcomer}", ("private",), ())
        assert [ref.part for ref in order.downloads] == ["shared"]
        assert (await server.ledger.snapshot()).record.adapting == {newcomer: 0}


async def hand_in(server: Server, order: OrderId) -> bool:
    """Hand in a changed copy of the shared part that the device is served."""
    served = (await server.state.lab.serve([order.client]))[order.client]["shared"]
    with TensorFile(server.blobs.open(served)) as file:
        trained = {name: tensor + len(order.client) for name, tensor in file.items()}
    part = write_tensors(partial(server.blobs.create, f"uploads/{order.client}"), trained)
    row = Report(round=order.round, work=order.work, client=order.client, samples=10)
    server.state.inbox.accept(order, row, {"shared": part})
    return await server.coordinator.updates.report(order)


async def test_a_device_that_is_revoked_during_the_aggregation_does_not_stop_it(world: World, monkeypatch) -> None:
    async with running(world, FEDAVG) as server:
        orders, coordinator = await first_orders(server), server.coordinator
        go_on = held_up(server, monkeypatch)
        assert [await hand_in(server, order) for order in orders] == [True, True]
        await coordinator.state.turns.step(coordinator.members.expel, "b")
        go_on.set()
        await server.closed(1)
        assert coordinator.error is None and not coordinator.unusable.is_set()
        assert coordinator.state.inbox.holds(orders[1]), "a damaged state is made again of it"


async def test_a_device_that_was_revoked_before_a_kill_does_not_count_after_it(tmp_path, monkeypatch) -> None:
    world = world_on_disk(tmp_path)

    async with running(world, FEDAVG) as server:
        orders, coordinator = await first_orders(server), server.coordinator
        held_up(server, monkeypatch)
        assert [await hand_in(server, order) for order in orders] == [True, True]
        await server.ledger.update_device("b", revoked=True)
        await coordinator.state.turns.step(coordinator.members.expel, "b")
    async with running(world, FEDAVG) as server:
        await server.closed(1)
        assert server.state.round.record.last_cohort == ("a",)
        assert not server.state.inbox.holds(OrderId("train", 1, "b"))


async def test_a_damaged_update_opens_its_round_again_and_its_device_sends_it_once_more(tmp_path, monkeypatch) -> None:
    """Kill the server between the last update and the commit, and flip a bit of an update. The state has the same bits."""

    def on_disk(name: str) -> World:
        (tmp_path / name).mkdir(exist_ok=True)
        return world_on_disk(tmp_path / name)

    async def state(server: Server) -> list[str]:
        await server.closed(1)
        return [slot.digest for slot in (await server.ledger.snapshot()).slots]

    found: list[list[str]] = []

    async with running(on_disk("one"), FEDAVG) as server:
        assert [await hand_in(server, order) for order in await first_orders(server)] == [True, True]
        found.append(await state(server))
    async with running(on_disk("two"), FEDAVG) as server:
        orders = await first_orders(server)
        commit = server.ledger.commit_round

        async def never(*_: Any) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(server.ledger, "commit_round", never)
        assert [await hand_in(server, order) for order in orders] == [True, True]
        monkeypatch.setattr(server.ledger, "commit_round", commit)
    path = tmp_path / "two" / "inbox" / "train-1-a" / "shared.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    async with running(on_disk("two"), FEDAVG) as server:
        assert server.state.round.record.phase is Phase.TRAINING
        streams = server.connect("a", "b")
        assert await hand_in(server, id_of(await next_order(streams[0])))
        found.append(await state(server))
    assert found[0] == found[1]


async def test_the_watchdog_barks_at_a_step_without_headway_and_is_quiet_again(world: World, monkeypatch) -> None:
    async with running(world) as server:
        told: asyncio.Queue[tuple[bool, list[str]]] = asyncio.Queue()

        def tell(healthy: bool) -> None:
            told.put_nowait((healthy, server.state.troubles.lines))

        orders = await first_orders(server)
        go_on = held_up(server, monkeypatch)
        watching = asyncio.create_task(watch(server.coordinator, 0.1, tell))
        for order in orders:
            await server.answer(order)
        async with aio.timeout(20):
            healthy, lines = await told.get()
            assert not healthy and "aggregating has made no headway" in lines[0]
            go_on.set()
            assert await told.get() == (True, [])
        watching.cancel()


@pytest.mark.parametrize("inline", [False, True])
async def test_work_in_turns_is_done_in_the_order_asked_and_carried_through(inline: bool) -> None:
    from attune.fedserver.federation.steps import InlineTurns, Turns

    turns, done = InlineTurns() if inline else Turns(), list[str]()

    def work(name: str) -> Callable[[], Coroutine[Any, Any, None]]:
        async def do() -> None:
            await asyncio.sleep(0.01)
            done.append(name)

        return do

    callers = [asyncio.create_task(turns.take(work(name))) for name in "abc"]
    await asyncio.sleep(0)
    if not inline:  # in one process no caller goes away before its work is done
        callers[1].cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    await turns.take(work("d"))
    assert done == ["a", "b", "c", "d"]
    assert turns.busy_s == 0.0


async def test_a_ledger_that_is_older_than_the_state_is_refused_and_nothing_is_swept_away(world: World) -> None:
    """Use a ledger as after a damaged journal of the database, or from a backup of the database alone."""
    async with running(world) as server:
        a, b = server.connect("a", "b")
        for number in (1, 2):
            for stream in (a, b):
                assert await server.answer(id_of(await next_order(stream)))
            await server.closed(number)
    blobs = [name for name in world.blobs.names("") if name.startswith(("state/", "inbox/"))]
    ledger = world.opened().ledger
    record = (await ledger.snapshot()).record
    await ledger.put_record(msgspec.structs.replace(record, round=0))
    await ledger.close()
    with pytest.raises(HomeMismatch, match="of a later one"):
        async with running(world):
            pass
    assert [name for name in world.blobs.names("") if name.startswith(("state/", "inbox/"))] == blobs


async def test_latecomers_that_answer_at_the_same_time_all_have_their_rows(world: World) -> None:
    """Commit each answer after the end by itself, while others arrive on other threads."""
    async with running(
        world, {"method": {"name": "local"}, "model": {"name": "mlr"}, "round": {"rounds": 1, "min_clients": 2}}
    ) as server:
        await server.enrol("c", "d")
        streams = server.connect("a", "b")
        for stream in (*streams, *streams):
            await server.answer(id_of(await next_order(stream)))
        assert (await server.ledger.snapshot()).record.phase is Phase.DONE
        orders = [id_of(await next_order(stream)) for stream in server.connect("c", "d")]
        inbox, clear = server.state.inbox, server.state.inbox.clear_evaluation

        def answered_meanwhile(number: int, clients: Iterable[str]) -> None:
            inbox.clear_evaluation = clear  # type: ignore[method-assign]
            inbox.accept(orders[1], Report(round=1, work="evaluate", client="d", samples=10), {})
            clear(number, clients)

        inbox.clear_evaluation = answered_meanwhile  # type: ignore[method-assign]
        inbox.accept(orders[0], Report(round=1, work="evaluate", client="c", samples=10), {})
        assert await server.coordinator.updates.report(orders[0]) and await server.coordinator.updates.report(orders[1])
        rows = (await server.ledger.snapshot()).rows
        assert sorted(row.client for row in rows if row.work == "evaluate") == ["a", "b", "c", "d"]


EQUAL = pytest.approx({"common": 0.5, "local": 0.5})
WEIGHS = {
    "method": {"name": "local"},
    "model": {"name": "mlr"},
    "round": {"rounds": 3, "min_clients": 2, "evaluate_each_last": 2},
}


async def until(
    server: Server,
    streams: Sequence[Stream],
    work: str,
    number: int,
    losses: Mapping[int, float],
    constant: float | None = None,
) -> list[Order]:
    """Return the orders of this work and round. In answers to earlier ones the model trained alone is far likelier.

    Devices that disclose statistics report the accuracy of a `constant` answer.
    """
    while True:
        orders = [await next_order(stream) for stream in streams]
        if (orders[0].work, orders[0].round) == (work, number):
            return orders
        for order in orders:
            found = {"likelihood_common": -80.0, "likelihood_local": -1.0} if order.work == "evaluate" else {}
            row = Report(
                round=order.round, work=order.work, client=id_of(order).client, samples=10, accuracy_constant=constant, **found
            )
            server.state.inbox.accept(id_of(order), row, {})
            await server.coordinator.updates.report(id_of(order), losses.get(order.round) if order.work == "train" else None)


async def test_what_was_found_of_a_state_that_was_taken_back_has_no_say(world: World) -> None:
    async with running(world, WEIGHS) as server:
        orders = await until(server, server.connect("a", "b"), "evaluate", 3, {1: 1.0, 2: 1.0, 3: 1000.0})
        assert "the state after round 2 was taken back" in (await server.ledger.snapshot()).record.setback
        assert [dict(order.prior) for order in orders] == [{}, {}]


async def test_who_is_revoked_has_no_say_any_more_in_this_process_as_in_the_next(world: World) -> None:
    async with running(world, WEIGHS, one_owner=True) as server:
        told = await until(server, server.connect("a", "b"), "evaluate", 3, {})
        assert all(order.prior["local"] > 0.6 for order in told)
        await server.ledger.update_device("a", revoked=True)
        await server.state.turns.step(server.coordinator.members.expel, "a")
        assert (await next_order(*server.connect("b"))).prior == EQUAL, "nobody else has voted"
    async with running(world, WEIGHS, one_owner=True) as server:
        assert (await next_order(*server.connect("b"))).prior == EQUAL


@pytest.mark.parametrize(
    ("devices", "constant", "told"), [("ab", None, False), ("ab", 0.5, True), ("abcd", None, False), ("abcde", None, True)]
)
async def test_what_fewer_than_five_devices_found_is_told_if_all_disclose(
    world: World, devices: str, constant: float | None, told: bool
) -> None:
    async with running(world, WEIGHS | {"round": WEIGHS["round"] | {"min_clients": len(devices)}}, devices) as server:
        orders = await until(server, server.connect(*devices), "evaluate", 3, {}, constant)
        assert [bool(order.prior) for order in orders] == [told] * len(devices)


async def test_under_noise_on_the_devices_no_device_is_told_what_others_found(world: World) -> None:
    """With `--metrics all` owners let the server see likelihoods, which have no noise; other devices get nothing of them."""
    privacy = {"unit": "example", "noise": 1.0, "ranges": [[-4, 4]] * 3}

    async with running(world, WEIGHS | {"round": WEIGHS["round"] | {"min_clients": 5}, "privacy": privacy}, "abcde") as server:
        streams = [server.members.connect(name, hello(encodings=[NOISE])) for name in "abcde"]
        orders = await until(server, streams, "evaluate", 3, {}, 0.5)
        assert [dict(order.prior) for order in orders] == [{}] * 5


async def test_a_device_that_needs_common_statistics_is_refused_where_there_are_none(world: World) -> None:
    """An older device sends its sums, and has no scale of its own; two of the three devices disclose nothing."""
    older = msgspec.structs.replace(PROFILE, columns=Columns(10, [0.0] * 3, [1.0] * 3))

    async with running(world, devices="abc") as server:
        stream = server.members.connect("a", Hello("old", msgspec.json.encode(older), ()))
        assert [(await next_order(stream)).work for stream in server.connect("b", "c")] == ["train", "train"]
        with pytest.raises(SettingError, match=r"a cannot standardise by its own statistics.*update fedclient"):
            await stream.next()
        with pytest.raises(SettingError, match="a cannot standardise by its own statistics"):
            server.members.connect("a", Hello("old", msgspec.json.encode(older), ()))
        assert server.state.plan is not None and server.state.plan.scale is None
