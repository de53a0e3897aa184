"""A device's own model against one rival on the same test samples, as reported: the same on the device and on the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attune.common.metrics import RIVALS, Choice
from attune.common.statistics import LEVEL, Finding, Z, difference, finding, holm, mcnemar, overall


@dataclass(frozen=True)
class Pair:
    """On how many samples the own model has the better score, and on how many a worse one.

    Scores of 0 or 1 need no more. Of other scores the device has reported the mean gain, its standard error and the p value of
    fedclient.work.permutation; else None.
    """

    rival: Choice
    better: int
    worse: int
    samples: int
    gain: float | None = None
    error: float | None = None
    tested: float | None = None

    @property
    def difference(self) -> float:
        """The mean gain."""
        return (self.better - self.worse) / max(1, self.samples) if self.gain is None else self.gain

    @property
    def p(self) -> float:
        """Of this comparison alone."""
        return mcnemar(self.better, self.worse) if self.tested is None else self.tested

    def interval(self) -> tuple[float, float]:
        """Of the difference at LEVEL; stretched to 0 where the test cannot exclude 0."""
        if self.gain is None:
            return difference(self.better, self.worse, self.samples)
        half = Z * (self.error or 0.0)
        low, high = self.gain - half, self.gain + half
        return (min(low, 0.0), max(high, 0.0)) if self.p > 1 - LEVEL else (low, high)

    def finding(self, p: float) -> Finding:
        """p: adjusted for all rivals."""
        return finding(self.difference, 0.0, p)


def pairs_of(reported: Mapping[str, Any]) -> list[Pair]:
    """Return the comparisons in metrics by name; a rival with which nothing was compared is left out."""
    pairs, samples = [], reported.get("test_samples") or 0
    for rival, names in RIVALS.items():
        better, worse = reported.get(names.better), reported.get(names.worse)
        if better is not None and worse is not None:
            tested = (reported.get(name) for name in (names.gain, names.error, names.p))
            pairs.append(Pair(rival, better, worse, samples, *tested))
    return pairs


def findings_of(pairs: list[Pair]) -> dict[Choice, Finding]:
    """All models equal, at least one finding is wrong with a probability of at most 1 - LEVEL."""
    adjusted = holm({pair.rival: pair.p for pair in pairs})
    return {pair.rival: pair.finding(adjusted[pair.rival]) for pair in pairs}


def gain_of(reported: Mapping[str, Any]) -> float | None:
    """What federation gives the device: by how much its own model is right more often than one that it trained alone.

    Where it trained none, than the common model. A difference of scores on the same test samples; None: not compared.
    """
    pair = _last(reported)
    return None if pair is None else pair.difference


def gain_between(reported: Mapping[str, Any]) -> tuple[float, float] | None:
    """The 95 % interval of `gain_of`."""
    pair = _last(reported)
    return None if pair is None else pair.interval()


def _last(reported: Mapping[str, Any]) -> Pair | None:
    """Against the rival that `gain_of` names."""
    return next(reversed(pairs_of(reported)), None) if reported.get("test_samples") else None


def verdict_of(reported: Mapping[str, Any]) -> Finding | None:
    """reported: metrics by name, as in the status. Its own model against its rivals; None where nothing was compared.

    The same test as on the device (fedclient.work.comparison).
    """
    pairs = pairs_of(reported)
    return overall(findings_of(pairs).values()) if pairs else None
