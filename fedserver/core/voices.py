"""Votes of devices: on what a federation is like, where the devices of one join token are one voice, and by scores."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from fractions import Fraction
from statistics import median_low
from typing import TypeVar

RATIO, FEW = 10, 100  # a device may declare so many times the usual number of classes or features, or so many
MOST_VOTE = 5  # bound on a vote by scores, in medians of all devices; `method.bound_samples` bounds weights by as many
FEWEST_VOTES = 3  # of fewer devices none is unusual

Option = TypeVar("Option")  # between which votes or scores choose


def votes_of(names: Collection[str], tokens: Mapping[str, str]) -> dict[str, Fraction]:
    """Return the weight of each device's vote; the devices of one token have the weight 1 together."""
    sizes = Counter(tokens[name] for name in names if tokens.get(name))
    return {name: Fraction(1, sizes.get(tokens.get(name, ""), 1)) for name in names}


def majority(values: Mapping[str, Option], votes: Mapping[str, Fraction]) -> Option | None:
    """Return the value of more than half of the votes of those that have one; None if there is none."""
    votes_for: dict[Option, Fraction] = defaultdict(Fraction)
    for name, value in values.items():
        votes_for[value] += votes[name]
    most = max(votes_for, key=lambda value: votes_for[value], default=None)
    return most if most is not None and 2 * votes_for[most] > sum(votes_for.values()) else None


def usual_and_most(counts: Mapping[str, int], tokens: Mapping[str, str]) -> tuple[int, int]:
    """Return the usual number of what devices declare, and the most that one device may: RATIO times as many, or FEW.

    The usual number is the median over the tokens of the median of their devices.
    """
    by_token: dict[str, list[int]] = defaultdict(list)
    for name in sorted(counts):
        by_token[tokens.get(name) or f"of {name}"].append(counts[name])
    usual = median_low(median_low(listed) for listed in by_token.values()) if by_token else 0
    return usual, max(RATIO * usual, FEW)


def bounded(scores: Mapping[Option, Mapping[str, float]]) -> dict[Option, dict[str, float]]:
    """Return the scores, with the vote of each device bounded to MOST_VOTE usual votes.

    The vote of a device is the range of its scores over the options: the highest minus the lowest. Above MOST_VOTE medians of
    the devices that see a difference, its scores are drawn together around their middle. The middle favours no option. But
    beside a huge middle the scores of other devices would be lost in rounding, so it is cut to MOST_VOTE medians, too.

    Args:
        scores: Score of each option by device; a device may lack options.
    """
    ranges: dict[str, tuple[float, float]] = {}
    for of in scores.values():
        for device, score in of.items():
            low, high = ranges.get(device, (score, score))
            ranges[device] = (min(low, score), max(high, score))
    if len(ranges) < FEWEST_VOTES:
        return {option: dict(of) for option, of in scores.items()}
    spreads = {device: high - low for device, (low, high) in ranges.items()}
    middles = {device: low + spreads[device] / 2 for device, (low, _) in ranges.items()}
    widest = MOST_VOTE * median_low([spread for spread in spreads.values() if spread] or [0.0])
    farthest = MOST_VOTE * median_low(abs(middle) for middle in middles.values())

    def counted(device: str, score: float) -> float:
        spread, middle = spreads[device], middles[device]
        if spread <= widest and abs(middle) <= farthest:
            return score
        share = min(1.0, widest / spread) if spread else 1.0
        return max(-farthest, min(middle, farthest)) + share * (score - middle)

    return {option: {device: counted(device, score) for device, score in of.items()} for option, of in scores.items()}
