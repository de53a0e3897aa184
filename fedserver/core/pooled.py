"""Pooled difference of AUROCs over sites: a random-effects mean, about new patients of these sites and these trained models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import msgspec

from attune.common.statistics import RIVAL_WORDS, student

LEAST_ERROR = 1e-3  # of a site: two equal models have 0, with which a site would decide alone
FOR_INTERVAL, FOR_PREDICTION = 3, 5  # sites
STEPS = 60  # halvings
WIDEST = 4.0  # variance between sites: differences lie from -1 to 1, so Q at it is below k - 1


class Pooled(msgspec.Struct, frozen=True):
    """Mean difference of what k sites keep and their ordinary models alone.

    Attributes:
        sites: k.
        gain: The mean.
        between: Variance between sites (Paule and Mandel, J. of Research of the National Bureau of Standards 1982).
        interval: Interval of the mean (Hartung and Knapp, Statistics in Medicine 2001), from 3 sites.
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

    def report(self) -> dict[str, Any]:
        """Return the figures and the words, for JSON."""
        return msgspec.structs.asdict(self) | {"words": self.words()}


def pooled_auroc(reports: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the report of the difference that devices have tested; None if no device has.

    Args:
        reports: Metrics of each device's last evaluation, by name.
    """
    evaluated = [metrics for metrics in reports if metrics.get("kept") is not None and metrics.get("test_samples")]
    claims = [(metrics.get("auroc_gain_alone"), metrics.get("auroc_error_alone")) for metrics in evaluated]
    over = pooled([(gain, error) for gain, error in claims if gain is not None and error is not None])
    too_few = sum(metrics.get("auroc_kept") is None for metrics in evaluated)
    return None if over is None else msgspec.structs.replace(over, too_few=too_few).report()


def pooled(sites: Sequence[tuple[float, float]]) -> Pooled | None:
    """Return the mean of differences, each with its standard error; None without any."""
    if not sites:
        return None
    gains, freedom = [gain for gain, _ in sites], len(sites) - 1
    variances = _smoothed([max(LEAST_ERROR, error) ** 2 for _, error in sites])
    low, high = 0.0, WIDEST if _weighed(gains, variances, 0.0)[1] > freedom else 0.0
    for _ in range(STEPS):
        between = (low + high) / 2
        low, high = (between, high) if _weighed(gains, variances, between)[1] > freedom else (low, between)
    mean, q, total = _weighed(gains, variances, high)
    if len(sites) < FOR_INTERVAL or len(set(gains)) == 1:
        return Pooled(len(sites), mean, high, None, None)
    error, prediction = math.sqrt(q / freedom / total), None
    if len(sites) >= FOR_PREDICTION:
        prediction = _about(mean, student(freedom - 1) * math.hypot(error, math.sqrt(high)))
    return Pooled(len(sites), mean, high, _about(mean, student(freedom) * error), prediction)


def _smoothed(variances: Sequence[float]) -> list[float]:
    """Return variances drawn half way, in their logarithms, to their median (Berkey et al., Statistics in Medicine 1995).

    They are estimates of a few cases, and small ones go with large areas. As they are, they would decide the weights too much:
    the interval covered 92 to 94 % in simulated fleets of five sites (benchmarks/calibrated.py).
    """
    middle = math.sqrt(median(variances))
    return [math.sqrt(variance) * middle for variance in variances]


def _weighed(gains: Sequence[float], variances: Sequence[float], between: float) -> tuple[float, float, float]:
    """Return the mean under this variance between sites, the sum of weighted squares about it, and that of the weights."""
    weights = [1 / (variance + between) for variance in variances]
    total = math.fsum(weights)
    mean = math.fsum(weight * gain for weight, gain in zip(weights, gains, strict=True)) / total
    return mean, math.fsum(weight * (gain - mean) ** 2 for weight, gain in zip(weights, gains, strict=True)), total


def _about(mean: float, half: float) -> tuple[float, float]:
    return mean - half, mean + half
