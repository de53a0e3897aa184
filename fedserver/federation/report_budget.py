"""Bound on the lines and notes that one device can make the server write."""

from __future__ import annotations

import logging
from collections import Counter

LOG = logging.getLogger("fedserver")
BYTES_A_MINUTE = 40_000  # of the reports of a device; two minutes meet in a moment, so a flood may get twice as many
LINE_BYTES = 240  # of a line beside the report itself
WINDOW_S = 60.0
LEFT_OUT = "%s reports more than %d bytes a minute: its further reports in this minute are counted, and not written"
COUNTED = "%s: %d reports were left out"


class ReportBudget:
    """Bytes that each device has reported in the present minute, and how many of its reports were left out."""

    def __init__(self) -> None:
        self._window_ends = float("-inf")
        self._bytes: Counter[str] = Counter()
        self._left_out: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"ReportBudget({len(self._bytes)} devices in this minute)"

    def allows(self, name: str, text: str, now: float) -> bool:
        """Count a report, and return whether it is written. A device above its budget gets two lines a minute.

        Args:
            name: The device.
            text: Its report.
            now: The present time (monotonic, seconds).
        """
        if now >= self._window_ends:
            for device, number in self._left_out.items():
                LOG.warning(COUNTED, device, number, extra={"device": device})
            self._window_ends, self._bytes, self._left_out = now + WINDOW_S, Counter(), Counter()
        self._bytes[name] += LINE_BYTES + len(text.encode())
        if self._bytes[name] <= BYTES_A_MINUTE:
            return True
        if not self._left_out[name]:
            LOG.warning(LEFT_OUT, name, BYTES_A_MINUTE, extra={"device": name})
        self._left_out[name] += 1
        return False
