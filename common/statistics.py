"""Confidence intervals of accuracies, and paired tests of two models on the same samples, one code for device and server.

Of n samples, one model does better on `won` and the other one on `lost`; on the rest they are equal.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean, stdev
from typing import Any, Literal, TypeVar

from attune.common.metrics import KEPT_RIVALS, RIVALS, OtherScore, Rival, RivalMetrics
from attune.common.task import SCORED, ScoredTask

LEVEL = 0.95
Z = NormalDist().inv_cdf((1 + LEVEL) / 2)


def interval_of(score: float, samples: int, task: ScoredTask = "classes") -> tuple[float, float] | None:
    """Return the confidence interval of a mean score; None where a score is no share of trials: R2, the C-index, AUROC.

    A sample with several labels counts as one trial, so its interval is rather too wide.
    """
    return wilson(score, samples) if SCORED[task].of_trials else None


def wilson(share: float, samples: int) -> tuple[float, float]:
    """Return the score interval at LEVEL of a share of independent trials, within 0 and 1 (Wilson, JASA 1927)."""
    if samples < 1:
        return 0.0, 1.0
    scale = 1 + Z * Z / samples
    middle = (share + Z * Z / (2 * samples)) / scale
    half = Z / scale * math.sqrt(share * (1 - share) / samples + Z * Z / (4 * samples * samples))
    return max(0.0, middle - half), min(1.0, middle + half)


Finding = Literal["better", "worse", "unclear"]
Verdict = Literal["better", "worse", "unclear", "too few cases"]
HelpOrHarm = Literal["helped", "harmed"]  # of a federation on a device
Name = TypeVar("Name", bound=str)
STEPS = 40  # halvings of an interval of length 2 or 11: far below what is shown
MANY = 200  # degrees of freedom from which Student's t is near the normal distribution


def student(freedom: int) -> float:
    """Return the two-sided quantile at LEVEL of Student's t with so many degrees of freedom, at least one.

    The distribution function is a finite sum (Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4).
    """
    if freedom > MANY:
        return Z * (1 + (Z * Z + 1) / (4 * freedom))  # the first term of its expansion (26.7.5): exact to 1e-5
    below, above = Z, 13.0  # the quantile of one degree is 12.7
    for _ in range(STEPS):
        middle = (below + above) / 2
        below, above = (middle, above) if _within(middle, freedom) < LEVEL else (below, middle)
    return above


def _within(t: float, freedom: int) -> float:
    """Return the probability that Student's t lies between -t and t."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term, total = (math.cos(angle), 0.0) if odd else (1.0, 0.0)
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= math.cos(angle) ** 2 * k / (k + 1)
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def student_p(t: float, freedom: int) -> float:
    """Return the two-sided p-value of Student's t with so many degrees of freedom, at least one."""
    return max(0.0, 1.0 - _within(abs(t), freedom))


def interval_of_mean(values: Sequence[float]) -> tuple[float, float] | None:
    """Return Student's interval at LEVEL of the mean of a sample; None below two values, which show no deviation."""
    if len(values) < 2:
        return None
    mean, half = fmean(values), student(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def mcnemar(won: int, lost: int) -> float:
    """Return the exact two-sided p-value of 'both are equally good': won ~ Binomial(won + lost, 1/2).

    McNemar, Psychometrika 1947. If a sample is a sequence with many labels, this is the sign test.
    """
    n = won + lost
    log_terms = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(min(won, lost) + 1))
    return min(1.0, 2 * math.fsum(math.exp(term - n * math.log(2)) for term in log_terms))


def holm(p: Mapping[Name, float]) -> dict[Name, float]:
    """Return p-values adjusted for all comparisons together (Holm, Scandinavian Journal of Statistics 1979)."""
    adjusted: dict[Name, float] = {}
    largest = 0.0
    for rank, name in enumerate(sorted(p, key=lambda name: p[name])):
        largest = max(largest, min(1.0, (len(p) - rank) * p[name]))
        adjusted[name] = largest
    return adjusted


def finding(won: float, lost: float, p: float) -> Finding:
    """Return the finding about one model against one rival, by counts or by scores. `p` is adjusted for all rivals."""
    if p > 1 - LEVEL:
        return "unclear"
    return "better" if won > lost else "worse"


def overall(findings: Collection[Finding]) -> Finding:
    """Return worse if the model is worse than any of these rivals, better if it is better than each of them, else unclear."""
    if "worse" in findings:
        return "worse"
    return "better" if set(findings) == {"better"} else "unclear"


def difference(won: int, lost: int, n: int) -> tuple[float, float]:
    """Return the interval of (won - lost) / n at LEVEL: Tango's score interval (Statistics in Medicine 1998).

    It is widened to 0 if the exact test cannot exclude 0. The interval is approximate and sometimes does so for small counts.
    """
    if n < 1:
        return -1.0, 1.0
    observed = (won - lost) / n  # included, since halving never quite reaches -1 and 1
    low, high = min(observed, _crossing(won, lost, n, Z)), max(observed, _crossing(won, lost, n, -Z))
    if mcnemar(won, lost) > 1 - LEVEL:
        low, high = min(low, 0.0), max(high, 0.0)
    return low, high


def _crossing(won: int, lost: int, n: int, z: float) -> float:
    """Find by bisection the difference at which the score statistic, which decreases, is `z`."""
    below, above = -1.0, 1.0
    for _ in range(STEPS):
        middle = (below + above) / 2
        below, above = (middle, above) if _score(won, lost, n, middle) > z else (below, middle)
    return (below + above) / 2


def _score(won: int, lost: int, n: int, delta: float) -> float:
    """Return by how many standard deviations the observed difference exceeds `delta`.

    The variance is that of the likeliest shares that differ by `delta`.
    """
    b = -won - lost + (2 * n - won + lost) * delta
    share_lost = (math.sqrt(max(0.0, b * b + 8 * n * lost * delta * (1 - delta))) - b) / (4 * n)
    variance = n * (2 * share_lost + delta * (1 - delta))
    distance = won - lost - n * delta
    if distance == 0:
        return 0.0  # also where the variance is 0: without discordant samples, at a difference of 0
    return distance / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, distance)


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
        gain, error, p = (reported.get(name) for name in (names.gain, names.error, names.p))
        if (better is not None and worse is not None) or gain is not None:  # an AUROC has no counts
            pairs.append(Pair(rival, better or 0, worse or 0, samples, gain, error, p, reported.get("test_groups")))
    return pairs


def findings_of(pairs: list[Pair]) -> dict[Rival, Finding]:
    """Return the finding about each rival, corrected by Holm for all of them.

    If all models are equally good, some finding is wrong with a probability of at most 1 - LEVEL.
    """
    adjusted = holm({pair.rival: pair.p for pair in pairs})
    return {pair.rival: pair.finding(adjusted[pair.rival]) for pair in pairs}


def column_of(others: Mapping[str, OtherScore], samples: int, groups: int | None = None) -> dict[str, Pair]:
    """Return the comparisons of other devices' networks with a device's own one, by device, their p-values corrected by Holm.

    Args:
        others: What the device reports of them.
        samples: Its test samples.
        groups: Independent groups of them; None: each sample is independent.
    """
    compared = {name: one for name, one in others.items() if one.better is not None or one.gain is not None}
    pairs = {
        name: Pair("common", one.better or 0, one.worse or 0, samples, one.gain, one.error, one.p, groups)
        for name, one in compared.items()
    }
    adjusted = holm({name: pair.p for name, pair in pairs.items()})
    return {name: replace(pair, tested=adjusted[name]) for name, pair in pairs.items()}


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


def shown_verdict(reported: Mapping[str, Any]) -> Verdict | None:
    """Return the verdict as people see it: where models are ranked, it may be that there are too few cases for one."""
    too_few = reported.get("ranked") and reported.get("kept") is not None and reported.get("auroc_kept") is None
    return "too few cases" if too_few and reported.get("test_samples") else verdict_of(reported)


def verdict_on(pairs: list[Pair]) -> Finding:
    """Return worse if any rival is better; better if no rival is, and each that counts (`to_beat`) is beaten; else unclear."""
    findings = findings_of(pairs)
    return "worse" if "worse" in findings.values() else overall(to_beat(findings))


def to_beat(by_rival: Mapping[Rival, T]) -> list[T]:
    """Return what belongs to the rivals that a federation must beat to help: models that the device can have without it.

    The common model is a gift of the federation. It counts only where no other was compared.
    """
    return [by_rival[rival] for rival in UNFEDERATED if rival in by_rival] or list(by_rival.values())
