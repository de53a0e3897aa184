"""How far an accuracy on a few samples can be trusted."""

from __future__ import annotations

import math
from statistics import NormalDist

LEVEL = 0.95
Z = NormalDist().inv_cdf((1 + LEVEL) / 2)


def wilson(share: float, samples: int) -> tuple[float, float]:
    """The score interval of a share of `samples` independent trials at LEVEL (Wilson, JASA 1927): it stays within 0 and 1."""
    if samples < 1:
        return 0.0, 1.0
    scale = 1 + Z * Z / samples
    middle = (share + Z * Z / (2 * samples)) / scale
    half = Z / scale * math.sqrt(share * (1 - share) / samples + Z * Z / (4 * samples * samples))
    return max(0.0, middle - half), min(1.0, middle + half)
