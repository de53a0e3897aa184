"""The end of a server with --exit-when-done: the devices for which it waits, and for how long."""

from __future__ import annotations

import asyncio
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from attune.common.aio import run, timeout
from attune.common.errors import FederationFailed
from attune.fedserver import app
from attune.fedserver.federation.streams import Streams

GRACE_S = 30.0


class Leaving(dict[str, float]):
    """Times at which devices left: a device that comes and goes has always left just now."""

    def __init__(self, now: Any) -> None:
        super().__init__(ada=0.0)
        self._now = now

    def __getitem__(self, name: str) -> float:
        return float(self._now())


def ended(left_at: dict[str, float], error: Exception | None = None) -> Any:
    """Return what `_goodbye` needs of a coordinator that has ended. Its clock moves on by a second with each look."""
    finished, ticks = asyncio.Event(), count(100)
    finished.set()
    state = SimpleNamespace(
        settings=SimpleNamespace(round=SimpleNamespace(grace_s=GRACE_S)),
        clock=SimpleNamespace(monotonic=lambda: float(next(ticks))),
        round=SimpleNamespace(left_at=left_at),
        streams=Streams(),
    )
    return SimpleNamespace(finished=finished, error=error, state=state)


@pytest.fixture(autouse=True)
def no_time_between_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "STEP_S", 0.0)


def seconds_of(coordinator: Any, returning: bool = False) -> float:
    """Return for how long the server waits, by the coordinator's clock."""

    async def goodbye() -> float:
        began = coordinator.state.clock.monotonic()
        async with timeout(20):
            await app._goodbye(coordinator, returning)
        return float(coordinator.state.clock.monotonic() - began)

    return run(goodbye())


def test_a_device_that_left_just_before_the_end_has_its_grace_to_return() -> None:
    assert GRACE_S - 5 < seconds_of(ended({"ada": 100.0})) < GRACE_S + 5
    assert app.RETURN_S - 5 < seconds_of(ended({"ada": 100.0}), returning=True) < app.RETURN_S + 5


@pytest.mark.parametrize("case", ["nobody left", "long ago", "had its farewell", "failed"])
def test_nobody_is_waited_for_in_vain(case: str) -> None:
    left_at = {} if case == "nobody left" else {"ada": 100.0 - (2 * GRACE_S if case == "long ago" else 0)}
    coordinator = ended(left_at, FederationFailed("broken") if case == "failed" else None)
    if case == "had its farewell":
        coordinator.state.streams.dismissed.add("ada")
    assert seconds_of(coordinator) < 10


def test_a_device_that_comes_and_goes_cannot_keep_the_server_from_ending() -> None:
    coordinator = ended({})
    coordinator.state.round.left_at = Leaving(coordinator.state.clock.monotonic)
    assert seconds_of(coordinator) < GRACE_S + 10
