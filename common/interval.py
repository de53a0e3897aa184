"""How far an accuracy on a few samples can be trusted."""

from __future__ import annotations

import math
from statistics import NormalDist

from attune.common.task import TaskName

LEVEL = 0.95
Z = NormalDist().inv_cdf((1 + LEVEL) / 2)


def interval_of(score: float, samples: int, task: TaskName = "classes") -> tuple[float, float] | None:
    """Of a mean score over so many samples. None in regression: the mean of squared errors alone has no interval.

    Where a sample has several labels it counts once, so the interval is rather too wide.
    """
    return None if task == "regression" else wilson(score, samples)


def wilson(share: float, samples: int) -> tuple[float, float]:
    """The score interval of a share of `samples` independent trials at LEVEL (Wilson, JASA 1927): it stays within 0 and 1."""
    if samples < 1:
        return 0.0, 1.0
    scale = 1 + Z * Z / samples
    middle = (share + Z * Z / (2 * samples)) / scale
    half = Z / scale * math.sqrt(share * (1 - share) / samples + Z * Z / (4 * samples * samples))
    return max(0.0, middle - half), min(1.0, middle + half)
