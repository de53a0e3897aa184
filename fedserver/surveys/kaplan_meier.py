"""Survival of a fleet's patients by Kaplan and Meier, from sums of counts over its devices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from attune.common.plan import FEWEST_ROWS
from attune.common.site_statistics import Centre, ColumnSketch, SiteSketches, bucket_value

MOST_STEPS = 20


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
    rows_D = [sum(sketch.counts) for sketch in times]
    least = max(FEWEST_ROWS, math.ceil(sum(sum(sketch.counts) for sketch in events) / MOST_STEPS))
    steps: list[tuple[float, int, int, float]] = []
    survival, begun, at_risk = 1.0, sum(rows_D), sum(rows_D)
    event_D, left_D = [0] * len(rows_D), [0] * len(rows_D)
    for bucket, counts in _by_bucket(times, events):
        survival *= 1 - sum(happened for _, _, happened in counts) / at_risk
        for device, seen, happened in counts:
            rows_D[device] -= seen
            event_D[device] += happened
            left_D[device] += seen - happened
            at_risk -= seen
        if _enough(event_D, fewest, least) and all(not any(part) or _enough(part, fewest) for part in (left_D, rows_D)):
            steps.append((max(0.0, bucket_value(bucket, centre)), begun, sum(event_D), survival))
            begun, event_D, left_D = at_risk, [0] * len(rows_D), [0] * len(rows_D)
    return KaplanMeier(*map(list, zip(*steps, strict=True))) if steps else None


def fleet_survival(
    sketches: Mapping[str, SiteSketches], centres: Mapping[str, Centre], survival: Sequence[str], fewest: int
) -> KaplanMeier | None:
    """Return the survival by the devices that sent both sketches."""
    if not survival or survival[0] not in centres or survival[1] not in centres:
        return None
    both = [[site.columns[name] for name in survival] for site in sketches.values() if set(survival) <= site.columns.keys()]
    return kaplan_meier([times for times, _ in both], [events for _, events in both], centres[survival[0]], fewest)


def is_within(events: ColumnSketch, times: ColumnSketch) -> bool:
    """Return whether no bucket has more events than times."""
    at = dict(enumerate(times.counts, times.first))
    return all(count <= at.get(bucket, 0) for bucket, count in enumerate(events.counts, events.first))


def _enough(count_D: Sequence[int], fewest: int, least: int = FEWEST_ROWS) -> bool:
    return sum(count_D) >= least and sum(count > 0 for count in count_D) >= fewest


def _by_bucket(
    times: Sequence[ColumnSketch], events: Sequence[ColumnSketch]
) -> Iterator[tuple[int, list[tuple[int, int, int]]]]:
    """Yield (bucket, (device, rows, events) of each device with rows in it), in ascending order."""
    entries: dict[int, list[tuple[int, int, int]]] = {}
    for device, (time, event) in enumerate(zip(times, events, strict=True)):
        happened = dict(enumerate(event.counts, event.first))
        for bucket, seen in enumerate(time.counts, time.first):
            if seen:
                entries.setdefault(bucket, []).append((device, seen, happened.get(bucket, 0)))
    yield from sorted(entries.items())
