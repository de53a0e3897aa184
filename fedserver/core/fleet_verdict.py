"""Verdict on a federation for its fleet and for each device: what devices keep, against what they could have instead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import Any

from attune.common.metrics import KEPT_RIVALS, Rival
from attune.common.statistics import RIVAL_WORDS, HelpOrHarm, Pair, interval_of_mean, mcnemar, pairs_of, to_beat


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
