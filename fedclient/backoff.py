"""How long to wait before the next try, and when to give up."""

from __future__ import annotations

FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 10.0
CONNECT_TIMEOUT_S = 300.0  # without a word from the server, unless the device's owner says otherwise


def backoff_s(failures: int) -> float:
    """After so many failures in a row (1, 2, ...): doubling, bounded. The caller adds jitter."""
    return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(failures - 1, 10))
