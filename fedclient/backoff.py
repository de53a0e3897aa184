"""How long to wait before the next try."""

from __future__ import annotations

FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 10.0


def backoff_s(failures: int) -> float:
    """After so many failures in a row (1, 2, ...): doubling, bounded. The caller adds jitter."""
    return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(failures - 1, 10))
