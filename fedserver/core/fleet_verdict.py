"""Verdict on a federation for its fleet and for each device: what devices keep, against what they could have instead.

Below it the pooled difference of AUROCs: a random-effects mean, about new patients of these sites and these trained models.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, median
from typing import Any

import msgspec

from attune.common.metrics import KEPT_RIVALS, Rival
from attune.common.statistics import RIVAL_WORDS, HelpOrHarm, Pair, interval_of_mean, mcnemar, pairs_of, student, to_beat


@dataclass(frozen=True)
class FleetVerdict:
    """Comparison of what all devices keep with one rival.

    Attributes:
        rival: The rival.
        gain: Mean over devices of the gain in the score. It estimates what another device like these would gain.
        interval: Its 95 % interval by Student's t over devices; None with one device.
        better: Number of devices whose gain is positive.
        worse: Number of devices whose gain is negative.
        p: The p-value of the exact sign test over devices.
        effects: What it did to each device: "helped" or "harmed" if it probably is, else None (fedserver.core.evidence).
    """

    rival: Rival
    gain: float
    interval: tuple[float, float] | None
    better: int
    worse: int
    p: float
    effects: Mapping[str, HelpOrHarm | None]

    @property
    def helped(self) -> int:
        """Number of devices that are probably helped."""
        return Counter(self.effects.values())["helped"]

    @property
    def harmed(self) -> int:
        """Number of devices that are probably harmed."""
        return Counter(self.effects.values())["harmed"]

    def report(self) -> dict[str, Any]:
        """Return the figures and the words, for JSON."""
        figures = {
            name: getattr(self, name) for name in ("rival", "gain", "interval", "better", "worse", "p", "helped", "harmed")
        }
        return {"devices": len(self.effects)} | figures | {"words": self.words()}

    def words(self) -> str:
        """Return the verdict as a line of text, the same words in every view."""
        between = "" if self.interval is None else ", 95 % for devices like these {:+.3f} to {:+.3f}".format(*self.interval)
        return (
            f"against {RIVAL_WORDS[self.rival]}: {self.gain:+.3f} on average{between}; better on {self.better} and worse on "
            f"{self.worse} of {len(self.effects)} devices (sign test p = {self.p:.2g}); {self.helped} probably helped, "
            f"{self.harmed} probably harmed"
        )


def fleet_verdicts(reports: Mapping[str, Mapping[str, Any]]) -> list[FleetVerdict]:
    """Return a verdict for each rival with which devices compared what they keep, the strongest first.

    Args:
        reports: Metrics of each device's last evaluation, by name.
    """
    by_rival: dict[Rival, dict[str, Pair]] = {}
    for device in sorted(reports):
        for pair in pairs_of(reports[device], KEPT_RIVALS):
            if pair.samples:
                by_rival.setdefault(pair.rival, {})[device] = pair
    return [_verdict(tuple(by_rival[rival].items())) for rival in RIVAL_WORDS if rival in by_rival]


def effect_of(verdicts: Sequence[FleetVerdict], device: str) -> HelpOrHarm | None:
    """Return the effect on one device: harmed if any rival is probably better, helped if it beats each that counts."""
    effects = {verdict.rival: verdict.effects[device] for verdict in verdicts if device in verdict.effects}
    if "harmed" in effects.values():
        return "harmed"
    return "helped" if set(to_beat(effects)) == {"helped"} else None


@lru_cache(maxsize=32)  # views ask for the same fleet again and again
def _verdict(listed: tuple[tuple[str, Pair], ...]) -> FleetVerdict:
    pairs = [pair for _, pair in listed]
    gains = [pair.difference for pair in pairs]
    better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
    effects = dict(zip((device for device, _ in listed), _effects(pairs), strict=True))
    between = interval_of_mean(gains) if len(set(gains)) > 1 else None  # equal gains show no deviation
    return FleetVerdict(pairs[0].rival, fmean(gains), between, better, worse, mcnemar(better, worse), effects)


def _effects(pairs: Sequence[Pair]) -> list[HelpOrHarm | None]:
    """Return the effect on each device: from counts where a score is right or wrong, else from gains and their errors."""
    from attune.fedserver.core.evidence import LEAST_DIFFERENCE, LEAST_GROUPS, beliefs_of_counts, beliefs_of_gains  # numpy

    effects: list[HelpOrHarm | None] = [None] * len(pairs)
    counted = [i for i, pair in enumerate(pairs) if pair.gain is None]
    beliefs = beliefs_of_counts([(pairs[i].better, pairs[i].worse) for i in counted])
    for i, belief in zip(counted, beliefs, strict=True):
        effects[i] = belief.effect(abs(pairs[i].better - pairs[i].worse) >= LEAST_DIFFERENCE)
    measured = [i for i, pair in enumerate(pairs) if pair.gain is not None and pair.independent >= LEAST_GROUPS]
    if measured:
        beliefs = beliefs_of_gains([(pairs[i].gain or 0.0, pairs[i].error or 0.0, pairs[i].independent) for i in measured])
        for i, belief in zip(measured, beliefs, strict=True):
            effects[i] = belief.effect()
    return effects


LEAST_ERROR = 1e-3  # of a site: two equal models have 0, with which a site would decide alone
FOR_INTERVAL, FOR_PREDICTION = 3, 5  # sites
STEPS = 60  # halvings
TINY = 1e-9  # in place of 0, where one site has all the weight
WIDEST = 4.0  # variance between sites: differences lie from -1 to 1, so Q at it is below k - 1


class Pooled(msgspec.Struct, frozen=True):
    """Mean difference of what k sites keep and their ordinary models alone.

    Attributes:
        sites: k.
        gain: The mean.
        between: Variance between sites (Paule and Mandel, J. of Research of the National Bureau of Standards 1982).
        interval: Student's interval of the mean by the robust variance (Sidik and Jonkman, Computational Statistics and Data
            Analysis 2006), from 3 sites. With equal weights it is Hartung and Knapp's. Few sites may agree by chance, so to
            either side it is at least the standard error that the mean has by the sites' own errors.
        prediction: Where the difference of another site like these lies, from 5 sites (Higgins et al., JRSS A 2009).
        too_few: Further sites, whose test parts have too few cases of a class.
    """

    sites: int
    gain: float
    between: float
    interval: tuple[float, float] | None
    prediction: tuple[float, float] | None
    too_few: int = 0

    def words(self) -> str:
        """Return the mean as a line of text, the same words in every view."""
        between = (
            f" (an interval needs {FOR_INTERVAL})"
            if self.interval is None
            else ", 95 % {:+.3f} to {:+.3f}".format(*self.interval)
        )
        another = "" if self.prediction is None else "; another site like these {:+.3f} to {:+.3f}".format(*self.prediction)
        left = f"; {self.too_few} more with too few cases" if self.too_few else ""
        return (
            f"AUROC against {RIVAL_WORDS['alone']}: {self.gain:+.3f} pooled over {self.sites} "
            f"site{'s' * (self.sites > 1)}{left}{between}, for new patients of these sites and these trained models{another}"
        )


def pooled_auroc(reports: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the figures and the words of the difference that devices have tested, for JSON; None if no device has.

    Args:
        reports: Metrics of each device's last evaluation, by name.
    """
    evaluated = [metrics for metrics in reports if metrics.get("kept") is not None and metrics.get("test_samples")]
    claims = [(metrics.get("auroc_gain_alone"), metrics.get("auroc_error_alone")) for metrics in evaluated]
    too_few = sum(metrics.get("auroc_kept") is None for metrics in evaluated)
    over = pooled([(gain, error) for gain, error in claims if gain is not None and error is not None], too_few)
    return None if over is None else msgspec.structs.asdict(over) | {"words": over.words()}


def pooled(sites: Sequence[tuple[float, float]], too_few: int = 0) -> Pooled | None:
    """Return the mean of differences, each with its standard error; None without any.

    Variances are estimates of a few cases, and small ones go with large areas. As they are, they would decide the weights too
    much: the interval covered 92 to 94 % in simulated fleets of five sites (benchmarks/calibrated.py). So in the weights they
    are drawn half way, in their logarithms, to their median (Berkey et al., Statistics in Medicine 1995). Hartung and Knapp's
    interval is for weights by the variances themselves; with these it covered up to 98 %.
    """
    if not sites:
        return None
    gains, errors, freedom = [gain for gain, _ in sites], [max(LEAST_ERROR, error) for _, error in sites], len(sites) - 1
    variances, usual = [error**2 for error in errors], math.sqrt(median(error**2 for error in errors))
    low, between = 0.0, WIDEST if _weighed(gains, variances, 0.0)[2] > freedom else 0.0
    for _ in range(STEPS):
        middle = (low + between) / 2
        low, between = (middle, between) if _weighed(gains, variances, middle)[2] > freedom else (low, middle)
    mean, shares, _ = _weighed(gains, [error * usual for error in errors], between)
    interval = prediction = None
    if len(sites) >= FOR_INTERVAL:
        robust = [(share * (gain - mean)) ** 2 / max(TINY, 1 - share) for share, gain in zip(shares, gains, strict=True)]
        sampling = math.fsum((share * error) ** 2 for share, error in zip(shares, errors, strict=True))
        error = max(math.sqrt(math.fsum(robust)), math.sqrt(sampling) / student(freedom))
        interval = _about(mean, student(freedom) * error)
    if len(sites) >= FOR_PREDICTION:
        prediction = _about(mean, student(freedom - 1) * math.hypot(error, math.sqrt(between)))
    return Pooled(len(sites), mean, between, interval, prediction, too_few)


def _weighed(gains: Sequence[float], variances: Sequence[float], between: float) -> tuple[float, list[float], float]:
    """Return the mean under this variance between sites, each site's share of the weight, and the sum of weighted squares."""
    weights = [1 / (variance + between) for variance in variances]
    total = math.fsum(weights)
    mean = math.fsum(weight * gain for weight, gain in zip(weights, gains, strict=True)) / total
    squares = math.fsum(weight * (gain - mean) ** 2 for weight, gain in zip(weights, gains, strict=True))
    return mean, [weight / total for weight in weights], squares


def _about(mean: float, half: float) -> tuple[float, float]:
    return mean - half, mean + half
