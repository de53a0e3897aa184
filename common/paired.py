"""Comparison of a device's model with its rivals on the same test samples: one code for device and server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from attune.common.metrics import KEPT_RIVALS, RIVALS, Rival, RivalMetrics
from attune.common.statistics import LEVEL, Finding, difference, finding, holm, mcnemar, overall, student

RIVAL_WORDS: Mapping[Rival, str] = {  # the strongest first
    "alone": "the best ordinary model alone (scikit-learn)",
    "local": "a network trained alone",
    "common": "the common model",
}
UNFEDERATED: tuple[Rival, ...] = ("alone", "local")  # what a device can have without the federation
T = TypeVar("T")


@dataclass(frozen=True)
class Pair:
    """Comparison of a model with one rival: the numbers of test samples on which it scores better and worse.

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


def pairs_of(reported: Mapping[str, Any], rivals: Mapping[Rival, RivalMetrics] | None = None) -> list[Pair]:
    """Return the comparisons in metrics by name; a rival with which nothing was compared is left out.

    Args:
        reported: Metrics by name.
        rivals: The names that say which model is compared: RIVALS for the own model, KEPT_RIVALS for the kept one. None: the
            kept one, or the own model of earlier devices, which compared no other.
    """
    if rivals is None:
        return pairs_of(reported, KEPT_RIVALS) or pairs_of(reported, RIVALS)
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
    """Return the gain by federation: the kept model's mean score minus that of the strongest rival in RIVAL_WORDS.

    That is ordinary models alone; without them a network trained alone, then the common model. None if nothing was compared.
    """
    pair = strongest(reported)
    return None if pair is None else pair.difference


def strongest(reported: Mapping[str, Any]) -> Pair | None:
    """Return the comparison that `gain_of` is about."""
    pairs = {pair.rival: pair for pair in pairs_of(reported)} if reported.get("test_samples") else {}
    return next((pairs[rival] for rival in RIVAL_WORDS if rival in pairs), None)


def verdict_of(reported: Mapping[str, Any]) -> Finding | None:
    """Return the verdict on what the device keeps, from metrics by name; None if nothing was compared."""
    pairs = pairs_of(reported)
    return verdict_on(pairs) if pairs else None


def verdict_on(pairs: list[Pair]) -> Finding:
    """Return worse if any rival is better; better if no rival is, and each that counts (`to_beat`) is beaten; else unclear."""
    findings = findings_of(pairs)
    return "worse" if "worse" in findings.values() else overall(to_beat(findings))


def to_beat(by_rival: Mapping[Rival, T]) -> list[T]:
    """Return what belongs to the rivals that a federation must beat to help: models that the device can have without it.

    The common model is a gift of the federation. It counts only where no other was compared.
    """
    return [by_rival[rival] for rival in UNFEDERATED if rival in by_rival] or list(by_rival.values())
