"""Readiness, by which a load balancer chooses a server: only what keeps all devices out takes it away."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from attune.common.config import ServerSettings
from attune.fedserver.federation.planner import PLANNING
from attune.fedserver.federation.steps import DOOR, STORES, Troubles
from attune.fedserver.web.sources import FaultFeed, RunningServer


@pytest.mark.parametrize("step", [PLANNING, "opening a round", "closing a round", "two processes use the identity of kiel"])
def test_a_round_that_waits_for_devices_lets_devices_in(step: str) -> None:
    """Behind a load balancer, a server that is not ready would never get the devices that it waits for."""
    server, troubles = _running()
    troubles.set(step, "2 devices are missing")
    assert server.trouble() == "" and len(server.troubles) == 1


@pytest.mark.parametrize("step", [DOOR, *STORES])
def test_a_server_that_can_let_nobody_in_is_not_ready(step: str) -> None:
    server, troubles = _running()
    troubles.set(step, "lost")
    assert server.trouble() == f"{step}: lost"
    troubles.clear(step)
    assert server.trouble() == ""


def _running() -> tuple[RunningServer, Troubles]:
    troubles = Troubles()
    state = SimpleNamespace(troubles=troubles, activity=None, settings=SimpleNamespace(server=ServerSettings()))
    coordinator: Any = SimpleNamespace(state=state, error=None, stuck_s=0.0)
    return RunningServer(cast("Any", coordinator), "localhost:1", FaultFeed()), troubles
