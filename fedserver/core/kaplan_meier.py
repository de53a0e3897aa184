"""Survival of a fleet's patients by Kaplan and Meier, from sums of counts over its devices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from attune.common.plan import FEWEST_ROWS
from attune.common.site_statistics import Centre, ColumnSketch, bucket_value

MOST_STEPS = 20
Counts = NDArray[np.int64]


class KaplanMeier(msgspec.Struct, frozen=True):
    """Survival over intervals of time, each of which ends at a time and begins behind the one before.

    Attributes:
        times: End of each interval, as exact as a quantile.
        at_risk: Rows without an event at the beginning of the interval.
        events: Events in the interval.
        survival: Probability of no event until its end (Kaplan and Meier, J. of the American Statistical Association 1958).
    """

    times: list[float]
    at_risk: list[int]
    events: list[int]
    survival: list[float]


def kaplan_meier(
    times: Sequence[ColumnSketch], events: Sequence[ColumnSketch], centre: Centre, fewest: int
) -> KaplanMeier | None:
    """Return the survival over time; None if it must be withheld.

    The estimate multiplies over buckets, in which events come before those who left. An interval ends where every count that
    follows from what is shown is a sum over enough devices and rows: its events, those who left in it without one, and those
    who are still at risk; of the last two there may also be none. What is behind the last such end is withheld.

    Args:
        times: Sketch of all times of each device, D of them.
        events: Sketch of the times of events of the same device, in the same order, with the same centre.
        centre: The centre.
        fewest: Least number of devices behind each number.
    """
    seen_DK, first = _table(times, times)
    event_DK, _ = _table(events, times)
    left_DK = seen_DK - event_DK
    after_DK = seen_DK.sum(axis=1, keepdims=True) - seen_DK.cumsum(axis=1)
    least = max(FEWEST_ROWS, math.ceil(event_DK.sum() / MOST_STEPS))
    steps: list[tuple[float, int, int, float]] = []
    survival, start = 1.0, 0
    for place in range(seen_DK.shape[1]):
        at_risk = int((after_DK + seen_DK)[:, place].sum())
        survival *= 1 - int(event_DK[:, place].sum()) / at_risk if at_risk else 1.0
        event_D, left_D = (part[:, start : place + 1].sum(axis=1) for part in (event_DK, left_DK))
        if not (
            _enough(event_D, fewest, least)
            and (not left_D.any() or _enough(left_D, fewest))
            and (not after_DK[:, place].any() or _enough(after_DK[:, place], fewest))
        ):
            continue
        begun = int((after_DK + seen_DK)[:, start].sum())
        steps.append((max(0.0, bucket_value(first + place, centre)), begun, int(event_D.sum()), survival))
        start = place + 1
    return KaplanMeier(*map(list, zip(*steps, strict=True))) if steps else None


def is_within(events: ColumnSketch, times: ColumnSketch) -> bool:
    """Return whether no bucket has more events than times."""
    at = dict(enumerate(times.counts, times.first))
    return all(count <= at.get(bucket, 0) for bucket, count in enumerate(events.counts, events.first))


def _enough(count_D: Counts, fewest: int, least: int = FEWEST_ROWS) -> bool:
    return int(count_D.sum()) >= least and int((count_D > 0).sum()) >= fewest


def _table(sketches: Sequence[ColumnSketch], reach: Sequence[ColumnSketch]) -> tuple[Counts, int]:
    """Return counts by device and bucket, (D, K), from the first to the last bucket of `reach`, and the first bucket."""
    filled = [sketch for sketch in reach if sketch.counts]
    first = min((sketch.first for sketch in filled), default=0)
    last = max((sketch.first + len(sketch.counts) for sketch in filled), default=0)
    count_DK = np.zeros((len(sketches), max(0, last - first)), dtype=np.int64)
    for row, sketch in zip(count_DK, sketches, strict=True):
        if sketch.counts:
            row[sketch.first - first :][: len(sketch.counts)] = sketch.counts
    return count_DK, first
