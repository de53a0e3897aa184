"""Notices a server that lives and does nothing: a step that makes no headway is said, and the health service follows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from attune.fedserver.federation.coordinator import Coordinator

WATCHDOG = "watchdog"  # the name of a trouble
LOOKS = 4  # in the span that it allows


async def watch(coordinator: Coordinator, limit_s: float, tell: Callable[[bool], None]) -> None:
    """Never ends. `tell` is called with False when a step makes no headway for `limit_s`, and with True when it does again."""
    healthy = True
    while True:
        await asyncio.sleep(limit_s / LOOKS)
        stuck_s = coordinator.stuck_s
        if stuck_s >= limit_s:
            phase = coordinator.round.record.phase
            coordinator.troubles.set(WATCHDOG, f"the step {phase} has made no headway for {limit_s:.0f} s or longer")
        else:
            coordinator.troubles.clear(WATCHDOG)
        if healthy != (stuck_s < limit_s):
            healthy = not healthy
            tell(healthy)
