"""Who is still there: every byte is a sign of life, and a side that has nothing to say sends a beat.

The two directions do not wait for each other: nobody answers a beat. So a direction that is full of bulk shows life by it,
and a direction that is not carries the beats in time, however long the queue on the other one is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

TICKS_A_PACE = 4
BEAT_TICKS = 2
LEAST_PACE_S = 0.1  # whatever the other side says
IDLE_TICKS = 2 * TICKS_A_PACE  # of silence on an idle link: twice the pace
BUSY_TICKS = 15 * TICKS_A_PACE  # while a transfer is under way, whose frames may queue in a modem for long


class Pulse:
    """What one side heard of the other.

    Silence is counted in ticks of the listener's own: a process that was stopped itself, or that was too busy to listen, has
    ticked as little as it has heard.
    """

    def __init__(self) -> None:
        self._tick_s = 0.0
        self._silent = self._ticks = self._underway = 0

    def __repr__(self) -> str:
        return f"<Pulse, silent for {self._silent} ticks of {self._tick_s:g} s, {self._underway} transfers>"

    @property
    def paced(self) -> bool:
        return self._tick_s > 0

    def keep(self, every_s: float) -> None:
        """The pace, in seconds, which the server sets (server.keepalive_s)."""
        self._tick_s = max(every_s, LEAST_PACE_S) / TICKS_A_PACE

    def heard(self) -> None:
        self._silent = 0

    @contextlib.contextmanager
    def transfer(self) -> Iterator[None]:
        """A transfer is under way inside: silence is given more time."""
        self._underway += 1
        try:
            yield
        finally:
            self._underway -= 1

    def tick(self) -> bool:
        """One more tick has passed: whether the other side has been silent for too long."""
        self._ticks += 1
        self._silent += 1
        return self._silent > (BUSY_TICKS if self._underway else IDLE_TICKS)

    @property
    def beat_is_due(self) -> bool:
        return self._ticks % BEAT_TICKS == 0

    async def watch(self, beat: Callable[[], None], gone: Callable[[], None]) -> None:
        """Ticks until it is cancelled or the other side is `gone`; `beat` is called where one is due."""
        while True:
            await asyncio.sleep(self._tick_s)
            if self.tick():
                gone()
                return
            if self.beat_is_due:
                beat()
