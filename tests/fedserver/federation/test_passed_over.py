"""Messages to the operator about devices whose changes are bounded."""

from __future__ import annotations

import logging

import pytest

from attune.fedserver.federation.steps import PassedOver, Troubles
from attune.fedserver.stores.memory import MemoryLedger


async def test_a_device_is_warned_of_once_and_then_told_among_others(caplog: pytest.LogCaptureFixture) -> None:
    """Honest devices with unlike data pass the bound in most rounds: 800 rounds must not be 800 warnings."""
    standing = PassedOver(MemoryLedger(), Troubles())
    caplog.set_level(logging.INFO, "fedserver")
    for number, bounded in enumerate([{"ada": 4.0}, {"ada": 5.0}, {"ada": 4.0, "eve": 90.0}, {"eve": 90.0}], start=1):
        await standing.bounded(number, bounded, without_vote=())
    said = [(record.levelname, record.getMessage().split(":")[0]) for record in caplog.records]
    assert said == [("WARNING", "round 1"), ("INFO", "round 2"), ("WARNING", "round 3"), ("INFO", "round 4")]
