"""Seeds of all random draws: H(seed, who, round, purpose), so that draws repeat and do not depend on arrival order."""

from __future__ import annotations

import hashlib


def derive(seed: int, *what: str | int) -> int:
    """Return a 63-bit seed for one purpose, such as `derive(seed, client, round, "batches")`."""
    text = "\x1f".join([str(seed), *map(str, what)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
