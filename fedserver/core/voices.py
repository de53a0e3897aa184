"""Votes of devices on what a federation is like. The devices of one join token are one voice."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from fractions import Fraction
from statistics import median_low

RATIO, FEW = 10, 100  # a device may declare so many times the usual number of classes or features, or so many


def votes_of(names: Collection[str], tokens: Mapping[str, str]) -> dict[str, Fraction]:
    """Return the weight of each device's vote; the devices of one token have the weight 1 together."""
    sizes = Counter(tokens[name] for name in names if tokens.get(name))
    return {name: Fraction(1, sizes.get(tokens.get(name, ""), 1)) for name in names}


def usual_and_most(counts: Mapping[str, int], tokens: Mapping[str, str]) -> tuple[int, int]:
    """Return the usual number of what devices declare, and the most that one device may: RATIO times as many, or FEW.

    The usual number is the median over the tokens of the median of their devices.
    """
    by_token: dict[str, list[int]] = defaultdict(list)
    for name in sorted(counts):
        by_token[tokens.get(name) or f"of {name}"].append(counts[name])
    usual = median_low(median_low(listed) for listed in by_token.values()) if by_token else 0
    return usual, max(RATIO * usual, FEW)
