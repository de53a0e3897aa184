"""Liveness of a link: every byte is a sign of life, and a side that has nothing to send sends a beat.

Beats are not answered, so the two directions are independent. A direction that is busy with a transfer shows life by its
bytes. An idle direction carries its beats in time, however long the queue of the other direction is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

TICKS_A_PACE = 4
BEAT_TICKS = 2
LEAST_PACE_S = 0.1  # lower limit, whatever the other side asks for
IDLE_TICKS = 2 * TICKS_A_PACE  # longest silence of an idle link: twice the pace
BUSY_TICKS = 15 * TICKS_A_PACE  # longest silence during a transfer, whose frames may queue in a modem


class Pulse:
    """Count of one side's silence, kept by the other side.

    Silence is counted in the listener's own ticks, not in seconds: a listener that was stopped, or too busy to listen, has not
    ticked either.
    """

    def __init__(self) -> None:
        self._tick_s = self._silent = self._ticks = 0.0
        self._underway = 0
        self.signs = 0  # of life so far

    @property
    def paced(self) -> bool:
        return self._tick_s > 0

    @property
    def every_s(self) -> float:
        """The pace in seconds; 0 without one."""
        return self._tick_s * TICKS_A_PACE

    def set_pace(self, every_s: float) -> None:
        """Set the pace in seconds, which the server decides (server.keepalive_s)."""
        self._tick_s = max(every_s, LEAST_PACE_S) / TICKS_A_PACE

    def heard(self) -> None:
        self._silent = 0
        self.signs += 1

    @contextlib.contextmanager
    def transfer(self) -> Iterator[None]:
        """Allow longer silence during the block, in which a transfer runs."""
        self._underway += 1
        try:
            yield
        finally:
            self._underway -= 1

    def tick(self, count: float = 1) -> bool:
        """Count one tick or some, and return whether the other side has been silent for too long."""
        self._ticks += count
        self._silent += count
        return self._silent > (BUSY_TICKS if self._underway else IDLE_TICKS)

    async def watch(self, beat: Callable[[], None], gone: Callable[[], None]) -> None:
        """Watch the link until cancelled: call `beat` when one is due, and `gone`, once, after too long a silence."""
        while True:
            await asyncio.sleep(self._tick_s)
            if self.tick():
                gone()
                return
            if self._ticks % BEAT_TICKS == 0:
                beat()
