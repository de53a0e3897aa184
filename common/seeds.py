"""Every random draw comes from H(seed, who, round, purpose): repeatable, and independent of arrival order."""

from __future__ import annotations

import hashlib


def derive(seed: int, *what: str | int) -> int:
    """A 63-bit seed for one purpose, such as `derive(seed, client, round, "batches")`; equal inputs give equal seeds."""
    text = "\x1f".join([str(seed), *map(str, what)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
