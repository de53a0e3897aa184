"""What the coordinator makes durable, and in which order: real home, real database, no network."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from attune.common.plan import Profile
from attune.fedserver.core.messages import Order, OrderId, Phase
from attune.fedserver.core.planning import resolve
from attune.fedserver.core.records import Row
from attune.fedserver.executors import Executors
from attune.fedserver.federation.coordinator import Coordinator
from attune.fedserver.federation.streams import Stream
from attune.fedserver.home import Home
from attune.fedserver.stores.sqlite import Store

PROFILE = Profile("tabular", (3,), [0, 1], 10, 4)
SAID = {"method": {"name": "local"}, "model": {"name": "mlr"}, "round": {"rounds": 2, "min_clients": 2}}


def on_a_server(
    folder: Path, scenario: Callable[[Coordinator, Store], Awaitable[None]], said: Mapping[str, Any] = SAID
) -> None:
    """Runs `scenario` against a coordinator on the home in `folder`, as one process would."""

    async def run() -> None:
        home = Home(folder)
        home.create()
        store, executors = Store(home.database), Executors()
        coordinator = Coordinator(home, store, resolve(said), "federation", executors)
        try:
            await coordinator.start()
            for name in ("a", "b"):
                if store.device(name) is None:
                    store.add_device(name, name)
            await scenario(coordinator, store)
        finally:
            executors.shutdown()
            store.close()

    asyncio.run(run())


async def next_order(session: Stream) -> OrderId:
    while True:
        message = await asyncio.wait_for(session.next(), 60)
        assert message is not None
        if isinstance(message, Order):
            return message.id


async def answer(coordinator: Coordinator, order: OrderId) -> bool:
    row = Row(round=order.round, work=order.work, client=order.client, samples=10, accuracy_before=0.5, test_samples=4)
    coordinator.inbox.accept(order, row, {})
    return await coordinator.report(order)


def test_a_commit_that_fails_did_not_happen_and_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fill_the_disk(coordinator: Coordinator, store: Store) -> None:
        sessions = [await coordinator.connect(name, PROFILE, "test") for name in ("a", "b")]
        orders = [await next_order(session) for session in sessions]

        def full(*_: object, **__: object) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        monkeypatch.setattr(store, "commit_round", full)
        assert [await answer(coordinator, order) for order in orders] == [True, True]
        assert coordinator.finished.is_set()
        assert (coordinator.round.record.phase, coordinator.round.record.round) == (Phase.FAILED, 0)
        assert "disk is full" in store.record().reason
        assert [await answer(coordinator, order) for order in orders] == [True, True], "sent again, it is still in the inbox"

    async def restarted(coordinator: Coordinator, store: Store) -> None:
        assert store.record().round == 1
        assert [(row.round, row.client) for row in store.rows()] == [(1, "a"), (1, "b")]
        session = await coordinator.connect("a", PROFILE, "test")
        await coordinator.connect("b", PROFILE, "test")
        assert (await next_order(session)).round == 2

    on_a_server(tmp_path, fill_the_disk)
    on_a_server(tmp_path, restarted)


def test_an_update_in_the_inbox_is_accepted_although_the_step_after_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answered late, it would be deleted from the inbox."""

    async def fill_the_disk(coordinator: Coordinator, store: Store) -> None:
        sessions = [await coordinator.connect(name, PROFILE, "test") for name in ("a", "b")]
        orders = [await next_order(session) for session in sessions]

        def full(*_: object, **__: object) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        monkeypatch.setattr(store, "put", full)
        assert [await answer(coordinator, order) for order in orders] == [True, True]
        assert coordinator.round.record.phase is Phase.FAILED
        monkeypatch.undo()

    async def restarted(coordinator: Coordinator, store: Store) -> None:
        assert [(row.round, row.client) for row in store.rows()] == [(1, "a"), (1, "b")]

    on_a_server(tmp_path, fill_the_disk)
    on_a_server(tmp_path, restarted)


def test_an_update_that_comes_while_the_round_closes_is_late_and_leaves_no_row(tmp_path: Path) -> None:
    async def scenario(coordinator: Coordinator, store: Store) -> None:
        sessions = [await coordinator.connect(name, PROFILE, "test") for name in ("a", "b")]
        first, second = [await next_order(session) for session in sessions]
        await coordinator.excuse("b", "no memory")
        coordinator.rules = resolve({**SAID, "round": {"rounds": 2, "min_clients": 2, "quorum": 1}}).rules
        assert await answer(coordinator, first)
        assert not await answer(coordinator, second)
        assert [(row.round, row.client) for row in store.rows()] == [(1, "a")]

    on_a_server(tmp_path, scenario)


def test_a_newer_stream_of_a_device_takes_its_orders_over(tmp_path: Path) -> None:
    async def scenario(coordinator: Coordinator, store: Store) -> None:
        old = await coordinator.connect("a", PROFILE, "test")
        await coordinator.connect("b", PROFILE, "test")
        order = await next_order(old)
        new = await coordinator.connect("a", PROFILE, "test")
        assert await next_order(new) == order
        await coordinator.disconnect(old)
        device = store.device("a")
        assert device is not None and device.connected, "the end of the old stream changes nothing"

    on_a_server(tmp_path, scenario)


def test_who_was_never_sampled_is_fitted_after_the_end_to_what_is_served_and_not_to_its_own(tmp_path: Path) -> None:
    """Where all devices train, such a one goes on from its own state: but what it leaves as it is must be the federation's."""
    rounds = {"rounds": 1, "min_clients": 2, "clients": 1, "train": "all", "adapt_rounds": 1}
    said = {"method": {"name": "fedper"}, "model": {"name": "dnn"}, "round": rounds}

    async def next_message(session: Stream) -> Order:
        while (message := await asyncio.wait_for(session.next(), 60)) is not None:
            if isinstance(message, Order):
                return message
        raise AssertionError("no order")

    async def scenario(coordinator: Coordinator, store: Store) -> None:
        sessions = {name: await coordinator.connect(name, PROFILE, "test") for name in ("a", "b")}
        for _ in ("train", "evaluate"):
            orders = {name: await next_message(session) for name, session in sessions.items()}
            for name, order in orders.items():
                part = tmp_path / f"{name}.safetensors"
                shutil.copyfile(coordinator.engine.vaults["shared"].blob("value").path, part)
                row = Row(
                    round=order.id.round, work=order.id.work, client=name, samples=10, accuracy_before=0.5, test_samples=4
                )
                coordinator.inbox.accept(order.id, row, {"shared": part} if order.returns else {})
                assert await coordinator.report(order.id)
        [newcomer] = {"a", "b"} - set(coordinator.round.record.last_cohort)
        order = await next_message(sessions[newcomer])
        assert (str(order.id), list(order.trains), list(order.returns)) == (f"train-2-{newcomer}", ["private"], [])
        assert [ref.part for ref in order.downloads] == ["shared"]
        assert store.record().adapting == {newcomer: 0}

    on_a_server(tmp_path, scenario, said)
