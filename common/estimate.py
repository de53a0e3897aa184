"""Progress of long work as lines with an estimate of the time left, for logs and pipes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
MEASUREMENTS = 3  # growths of the share before the first line. The first ones hold the loading of libraries
FIRST_S = 5.0  # work that takes less gets no line
LONGEST_S = 300.0  # longest pause between two lines; the pause doubles from FIRST_S on


class Estimate:
    """Estimates of the time left for one piece of work after another. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._what, self._share = clock, "", 1.0
        self._due_s = clock()
        self._pause_s = FIRST_S
        self._grown = 0
        self._first = (0.0, 0.0)  # when the share had grown first, and to what

    def at(self, what: str, share: float) -> str | None:
        """Return a line if one is due. `share`: how much of `what` is done, 0 to 1.

        Another `what`, or a smaller share, starts a new estimate. The time left follows from the pace after the first growth of
        the share.
        """
        now = self._clock()
        if what != self._what or share < self._share:
            self._pause_s, self._due_s, self._grown = FIRST_S, now + FIRST_S, 0
            self._share = 0.0
        if share > self._share:
            self._grown += 1
            if self._grown == 1:
                self._first = (now, share)
        self._what, self._share = what, share
        if now < self._due_s or share >= 1 or self._grown < MEASUREMENTS:
            return None
        self._pause_s = min(LONGEST_S, 2 * self._pause_s)
        self._due_s = now + self._pause_s
        began, at_first = self._first
        return f"{what}: {share:.0%}, about {span((now - began) * (1 - share) / (share - at_first))} left"


def span(seconds: float) -> str:
    """Format a time as `12 s`, `3 min` or `2 h 10 min`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def with_estimate(items: Sequence[T], what: str, say: Callable[[str], None] | None = None) -> Iterator[T]:
    """Yield the items; write a line about the progress to stderr (or to `say`) if it takes long."""
    estimate, tell = Estimate(), say or to_stderr
    for done, item in enumerate(items):
        if line := estimate.at(what, done / len(items)):
            tell(line)
        yield item


def to_stderr(line: str) -> None:
    """Write a line to stderr at once."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
