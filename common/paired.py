"""Comparison of a device's own model with its rivals on the same test samples: one code for device and server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attune.common.metrics import RIVALS, Rival, RivalMetrics
from attune.common.statistics import LEVEL, Finding, difference, finding, holm, mcnemar, overall, student


@dataclass(frozen=True)
class Pair:
    """Comparison of the own model with one rival: the numbers of test samples on which it scores better and worse.

    Scores of 0 or 1 need no more. For other scores the device also reports the mean gain, its standard error and the p-value of
    the permutation test (`tested`).
    """

    rival: Rival
    better: int
    worse: int
    samples: int
    gain: float | None = None
    error: float | None = None
    tested: float | None = None
    groups: int | None = None  # independent groups of the test samples; None: each sample is independent

    @property
    def difference(self) -> float:
        """The mean gain."""
        return (self.better - self.worse) / max(1, self.samples) if self.gain is None else self.gain

    @property
    def independent(self) -> int:
        """Number of independent pieces of evidence: the groups of test samples, or the samples."""
        return self.samples if self.groups is None else self.groups

    @property
    def p(self) -> float:
        """Uncorrected p-value of this comparison."""
        return mcnemar(self.better, self.worse) if self.tested is None else self.tested

    def interval(self) -> tuple[float, float]:
        """Return the interval of the difference at LEVEL, widened to 0 if the test cannot exclude 0."""
        if self.gain is None:
            return difference(self.better, self.worse, self.samples)
        if self.independent < 2:
            return -1.0, 1.0  # the mean of one group says nothing about others
        half = student(self.independent - 1) * (self.error or 0.0)
        low, high = self.gain - half, self.gain + half
        return (min(low, 0.0), max(high, 0.0)) if self.p > 1 - LEVEL else (low, high)

    def finding(self, p: float) -> Finding:
        """Return the finding about this rival; `p` is adjusted for all rivals."""
        return finding(self.difference, 0.0, p)


def pairs_of(reported: Mapping[str, Any], rivals: Mapping[Rival, RivalMetrics] = RIVALS) -> list[Pair]:
    """Return the comparisons in metrics by name; a rival with which nothing was compared is left out.

    Args:
        reported: Metrics by name.
        rivals: The names that say which model is compared: RIVALS for the own model, KEPT_RIVALS for the kept one.
    """
    pairs, samples = [], reported.get("test_samples") or 0
    for rival, names in rivals.items():
        better, worse = reported.get(names.better), reported.get(names.worse)
        if better is not None and worse is not None:
            gain, error, p = (reported.get(name) for name in (names.gain, names.error, names.p))
            pairs.append(Pair(rival, better, worse, samples, gain, error, p, reported.get("test_groups")))
    return pairs


def findings_of(pairs: list[Pair]) -> dict[Rival, Finding]:
    """Return the finding about each rival, corrected by Holm for all of them.

    If all models are equally good, some finding is wrong with a probability of at most 1 - LEVEL.
    """
    adjusted = holm({pair.rival: pair.p for pair in pairs})
    return {pair.rival: pair.finding(adjusted[pair.rival]) for pair in pairs}


def gain_of(reported: Mapping[str, Any]) -> float | None:
    """Return the gain by federation: the own model's mean score minus that of a model trained alone.

    Without a model trained alone, the common model takes its place. None if the device has compared nothing.
    """
    pair = _last(reported)
    return None if pair is None else pair.difference


def gain_between(reported: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the 95 % interval of `gain_of`."""
    pair = _last(reported)
    return None if pair is None else pair.interval()


def _last(reported: Mapping[str, Any]) -> Pair | None:
    """Return the comparison that `gain_of` is about."""
    return next(reversed(pairs_of(reported)), None) if reported.get("test_samples") else None


def verdict_of(reported: Mapping[str, Any]) -> Finding | None:
    """Return the verdict on the own model against all its rivals, from metrics by name; None if nothing was compared."""
    pairs = pairs_of(reported)
    return overall(findings_of(pairs).values()) if pairs else None
