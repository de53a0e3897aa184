"""Whether the device's own model is better than its rivals, by the answers that they gave to the same test samples."""

from __future__ import annotations

from dataclasses import dataclass

from attune.common.metrics import Choice
from attune.common.statistics import Finding, difference, finding, holm, mcnemar, overall
from attune.fedclient.messages import Result


@dataclass(frozen=True)
class Comparison:
    """The device's own model against one rival: on how many of the test samples it does better, and on how many worse."""

    rival: Choice
    better: int
    worse: int
    low: float  # of (better - worse) / samples: its interval, for this comparison alone
    high: float
    p: float  # adjusted for all comparisons of the device
    samples: int

    @property
    def difference(self) -> float:
        return (self.better - self.worse) / self.samples

    @property
    def finding(self) -> Finding:
        return finding(self.better, self.worse, self.p)


def comparisons_of(result: Result) -> list[Comparison]:
    """One for each rival; none where nothing was compared or there are no test samples.

    All models equal, at least one finding is wrong with a probability of at most 1 - LEVEL.
    """
    samples = result.test_samples or 0
    if not samples:
        return []
    p = holm({rival: mcnemar(better, worse) for rival, (better, worse) in result.rivals.items()})
    return [
        Comparison(rival, better, worse, *difference(better, worse, samples), p[rival], samples)
        for rival, (better, worse) in result.rivals.items()
    ]


def finding_of(comparisons: list[Comparison]) -> Finding:
    """Worse, if the own model is worse than any rival; better, if it is better than every rival; else unclear."""
    return overall({comparison.finding for comparison in comparisons})
