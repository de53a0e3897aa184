"""Fixtures: `play` runs a test over each implementation of the link; `committed` is a result to hand in."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
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
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Scenario], Any]:
    """Return a function that runs a scenario with a link and its server, and returns the scenario's result."""
    runs = itertools.count()

    async def run(scenario: Scenario) -> Any:
        scripted = Scripted()
        async with aio.timeout(60):
            if request.param == "within the process":
                return await scenario(LocalLink("kiel", scripted), scripted)
            server = OverGrpc(scripted, tmp_path / f"authority{next(runs)}")
            link = await server.start()
            try:
                return await scenario(link, scripted)
            finally:
                await link.close()
                await server.stop()

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
