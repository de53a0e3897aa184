"""Signs of life on the devices' streams: the pace of beats grows with the fleet, and one task looks after all streams.

A device that is idle costs its beats. So a stream is looked at once in each half of its pace, when a beat is due anyway, and
has no timer of its own. When the fleet has grown, a beat offers a slower pace. It counts once the device repeats it: an older
device stays with the pace of its first beat.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from attune.common.errors import Unreachable
from attune.common.exchange.messages import Beat
from attune.common.pulse import LEAST_PACE_S, TICKS_A_PACE, Pulse
from attune.fedserver.federation.streams import Stream

A_DEVICE_S = 0.01  # seconds by which each open stream makes the pace slower
SLOWEST_S = 60.0  # that the pace may become so
CHANGE = 1.5  # times faster or slower that a pace must be to be offered
TURNS = 8  # of the wheel, in the pace of a small fleet


@dataclass(eq=False, slots=True)
class WatchedStream:
    """A stream that gets beats.

    Attributes:
        stream: The stream.
        left_s: Return the seconds for which the device's certificate is valid.
        offered_s: The pace of the beats that it is sent.
        beats: Whether the device beats, so that its silence counts. An older device does not.
        pulse: Signs of life of the device.
        after_s: Seconds between the last look and the next one.
    """

    stream: Stream
    left_s: Callable[[], float]
    offered_s: float
    beats: bool = False
    pulse: Pulse = field(default_factory=Pulse)
    after_s: float = 0.0

    def heard(self, beat: Beat) -> None:
        """Note a beat of the device, which may accept the pace that it was offered."""
        self.beats = True
        if beat.every_s == self.offered_s != self.pulse.every_s:
            self.pulse.set_pace(beat.every_s)

    def look(self, pace_s: float) -> float | None:
        """Send a beat, and return the seconds until the next one is due; None: the stream has ended.

        Args:
            pace_s: The pace that fits the fleet now.
        """
        if self.stream.closed:
            return None
        if self.pulse.tick(TICKS_A_PACE * self.after_s / self.pulse.every_s) and self.beats:
            self.stream.close(Unreachable(f"nothing was heard of {self.stream.name} for too long: it must reconnect"))
            return None
        if not self.offered_s / CHANGE < pace_s < self.offered_s * CHANGE:
            self.offered_s = pace_s
        self.stream.beat(Beat(self.offered_s))
        return min(self.offered_s, self.pulse.every_s) / 2


class DevicePulses:
    """Pulse of each device's newest stream. `every_s` is the pace of a small fleet (server.keepalive_s)."""

    def __init__(self, every_s: float) -> None:
        self.every_s = every_s
        self._of: dict[str, WatchedStream] = {}
        self._turn, self._turn_s = 0, max(every_s, LEAST_PACE_S) / TURNS
        self._due: dict[int, list[WatchedStream]] = {}  # by turn

    def pace(self, name: str) -> float:
        """Return the pace of a stream that this device opens now, in seconds."""
        return self._pace(len(self._of) - (name in self._of))

    def open(self, stream: Stream, every_s: float, left_s: Callable[[], float]) -> WatchedStream:
        """Look after a new stream, whose first beat was sent. Transfers show life on it from now on."""
        watched = self._of[stream.name] = WatchedStream(stream, left_s, every_s)
        watched.pulse.set_pace(every_s)
        self._plan(watched, every_s / 2)
        return watched

    def close(self, watched: WatchedStream) -> None:
        """Drop a stream that ended. A newer one of the device stays."""
        if self._of.get(watched.stream.name) is watched:
            del self._of[watched.stream.name]

    def of(self, name: str) -> Pulse:
        """Return the pulse of a device; without a stream, one that is not watched."""
        watched = self._of.get(name)
        return Pulse() if watched is None else watched.pulse

    async def run(self) -> None:
        """Look after all streams until cancelled."""
        while True:
            await asyncio.sleep(self._turn_s)
            self.turn()

    def turn(self) -> None:
        """Look at the streams that are due. A turn costs nothing for the others."""
        self._turn += 1
        for watched in self._due.pop(self._turn, ()):
            next_s = watched.look(self._pace(len(self._of) - 1))
            if next_s is not None:
                self._plan(watched, next_s)

    def _pace(self, others: int) -> float:
        return max(self.every_s, min(others * A_DEVICE_S, SLOWEST_S))

    def _plan(self, watched: WatchedStream, after_s: float) -> None:
        """Plan the next look, at the latest when the certificate is over: then the stream ends with it."""
        turns = max(1, math.ceil(min(after_s, watched.left_s()) / self._turn_s))
        watched.after_s = turns * self._turn_s
        self._due.setdefault(self._turn + turns, []).append(watched)
