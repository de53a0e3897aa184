"""The clocks of a process, as values: a test hands in its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    """monotonic: seconds, for spans; nobody can set it. unix: the time of day, for what people are shown.

    stands: monotonic does not move, so nothing ever falls due.
    """

    monotonic: Callable[[], float] = time.monotonic
    unix: Callable[[], float] = time.time
    stands: bool = False
