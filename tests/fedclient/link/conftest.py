"""Fixtures: `linked` and `play` are over each implementation of the link; `committed` is a result to hand in."""

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from attune.common import aio
from attune.fedclient import address
from attune.fedclient.link.port import Link
from attune.fedclient.messages import OrderResult
from attune.fedclient.work.state import FolderOrders
from attune.simulation.in_process import LocalLink
from tests.fedclient.link.server import OverGrpc, Scripted
from tests.fedserver.identity.conftest import authority, device, live, serve, stranger

__all__ = ["authority", "device", "live", "serve", "stranger"]  # fixtures of test_diagnose

Scenario = Callable[[Link, Scripted], Awaitable[Any]]
ORDER = "train-1-kiel"
TENSORS = {"head.weight": torch.arange(10_000, dtype=torch.float32)}


@pytest.fixture(params=["within the process", "over gRPC"])
def linked(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], AbstractAsyncContextManager[tuple[Link, Scripted]]]:
    """Return a function that opens a link to a server, for a minute at most."""
    runs = itertools.count()

    @asynccontextmanager
    async def opened() -> AsyncIterator[tuple[Link, Scripted]]:
        scripted = Scripted()
        async with aio.timeout(60):
            if request.param == "within the process":
                yield LocalLink("kiel", scripted), scripted
                return
            server = OverGrpc(scripted, tmp_path / f"authority{next(runs)}")
            link = await server.start()
            try:
                yield link, scripted
            finally:
                await link.close()
                await server.stop()

    return opened


@pytest.fixture
def play(linked: Callable[[], AbstractAsyncContextManager[tuple[Link, Scripted]]]) -> Callable[[Scenario], Any]:
    """Return a function that runs a scenario with a link and its server, and returns the scenario's result."""

    async def run(scenario: Scenario) -> Any:
        async with linked() as pair:
            return await scenario(*pair)

    return lambda scenario: aio.run(run(scenario))


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(address, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(address, "LONGEST_DELAY_S", 0.02)


@pytest.fixture
def committed(tmp_path: Path) -> tuple[FolderOrders, OrderResult]:
    """Write a result to disk: one part of 40 kB."""
    orders = FolderOrders(tmp_path / "orders")
    result = OrderResult(order_id=ORDER, round=1, trained=True, samples=20, sequence=1)
    return orders, orders.commit(result, TENSORS, {}, {"shared": TENSORS})
