"""Every test of this folder that asks for `play` runs over each implementation of the link."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from attune.fedclient.link.local import LocalLink
from attune.fedclient.link.port import Link
from tests.link.server import OverGrpc, Scripted

Scenario = Callable[[Link, Scripted], Awaitable[Any]]


@pytest.fixture(params=["within the process", "over gRPC"])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Scenario], Any]:
    """Runs a scenario with a link and the server that it leads to; what the scenario returns."""

    runs = itertools.count()

    async def run(scenario: Scenario) -> Any:
        scripted = Scripted()
        async with asyncio.timeout(60):
            if request.param == "within the process":
                return await scenario(LocalLink("kiel", scripted), scripted)
            server = OverGrpc(scripted, tmp_path / f"authority{next(runs)}")
            link = await server.start()
            try:
                return await scenario(link, scripted)
            finally:
                await link.close()
                await server.stop()

    return lambda scenario: asyncio.run(run(scenario))
