"""Bound on the lines and notes that one device can make the server write."""

from __future__ import annotations

import logging
from collections import Counter

LOG = logging.getLogger("fedserver")
A_MINUTE = 30  # reports of a device and kind that are written; a line has at most 700 bytes
WINDOW_S = 60.0
LEFT_OUT = "%s reports more than %d times a minute: what it reports in the next minute is counted, and not written"
COUNTED = "%s: %d reports were left out"


class ReportBudget:
    """Counts of what each device has reported in the present minute. Each device and kind of report has a budget."""

    def __init__(self) -> None:
        self._window_ends = float("-inf")
        self._count: Counter[tuple[str, str]] = Counter()

    def __repr__(self) -> str:
        return f"ReportBudget({len(self._count)} in this minute)"

    def allows(self, name: str, kind: str, now: float) -> bool:
        """Count a report, and return whether it is written. Each device and kind above its budget gets two lines a minute.

        Args:
            name: The device.
            kind: The kind of report.
            now: The present time (monotonic, seconds).
        """
        if now >= self._window_ends:
            over = {key: count - A_MINUTE for key, count in self._count.items() if count > A_MINUTE}
            self._window_ends, self._count = now + WINDOW_S, Counter()
            for (device, _), number in over.items():
                LOG.warning(COUNTED, device, number, extra={"device": device})
        self._count[name, kind] += 1
        if self._count[name, kind] == A_MINUTE + 1:
            LOG.warning(LEFT_OUT, name, A_MINUTE, extra={"device": name})
        return self._count[name, kind] <= A_MINUTE
