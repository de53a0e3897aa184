"""Which of two models is better on the same samples: paired tests, and how large the difference may be.

Of n samples one model does better on `won` and the other one on `lost`; the rest says nothing about which is better.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from statistics import NormalDist
from typing import Literal, TypeVar

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


Finding = Literal["better", "worse", "unclear"]
Name = TypeVar("Name", bound=str)
STEPS = 40  # halvings of an interval of length 2: far below what is shown


def mcnemar(won: int, lost: int) -> float:
    """Exact p value, two-sided, of 'both are equally good': won ~ Binomial(won + lost, 1/2).

    McNemar, Psychometrika 1947; where a sample is a sequence with many labels, this is the sign test.
    """
    n = won + lost
    log_terms = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(min(won, lost) + 1))
    return min(1.0, 2 * math.fsum(math.exp(term - n * math.log(2)) for term in log_terms))


def holm(p: Mapping[Name, float]) -> dict[Name, float]:
    """p values adjusted so that all comparisons together err at the level of one (Holm, Scandinavian J. of Statistics 1979)."""
    adjusted: dict[Name, float] = {}
    largest = 0.0
    for rank, name in enumerate(sorted(p, key=lambda each: p[each])):
        largest = max(largest, min(1.0, (len(p) - rank) * p[name]))
        adjusted[name] = largest
    return adjusted


def finding(won: float, lost: float, p: float) -> Finding:
    """Of one model against one rival, by counts or by scores; p: adjusted for all rivals."""
    if p > 1 - LEVEL:
        return "unclear"
    return "better" if won > lost else "worse"


def overall(findings: Collection[Finding]) -> Finding:
    """Worse, if the model is worse than any rival; better, if it is better than every rival; else unclear."""
    if "worse" in findings:
        return "worse"
    return "better" if set(findings) == {"better"} else "unclear"


def difference(won: int, lost: int, n: int) -> tuple[float, float]:
    """The interval of (won - lost) / n at LEVEL: Tango's score interval for paired shares (Statistics in Medicine 1998).

    It is stretched to 0 where the exact test cannot exclude 0, which the approximate one sometimes does for small counts.
    """
    if n < 1:
        return -1.0, 1.0
    observed = (won - lost) / n  # -1 and 1 are never quite reached by halving
    low, high = min(observed, _crossing(won, lost, n, Z)), max(observed, _crossing(won, lost, n, -Z))
    if mcnemar(won, lost) > 1 - LEVEL:
        low, high = min(low, 0.0), max(high, 0.0)
    return low, high


def _crossing(won: int, lost: int, n: int, z: float) -> float:
    """The difference at which the score statistic, which falls, is `z`."""
    below, above = -1.0, 1.0
    for _ in range(STEPS):
        middle = (below + above) / 2
        below, above = (middle, above) if _score(won, lost, n, middle) > z else (below, middle)
    return (below + above) / 2


def _score(won: int, lost: int, n: int, delta: float) -> float:
    """How many standard deviations the observed difference lies above `delta`, by the likeliest shares that differ by it."""
    b = -won - lost + (2 * n - won + lost) * delta
    share_lost = (math.sqrt(max(0.0, b * b + 8 * n * lost * delta * (1 - delta))) - b) / (4 * n)
    variance = n * (2 * share_lost + delta * (1 - delta))
    distance = won - lost - n * delta
    return distance / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, distance)
