"""Statistics of a fleet's data before training: the sums of many devices, and what may be shown of them.

Every number that is shown is a sum over at least FEWEST_DEVICES devices and FEWEST_ROWS rows, or is withheld.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import reduce
from itertools import accumulate

import msgspec

from attune.common.errors import UpdateRefused
from attune.common.plan import FEWEST_DEVICES, FEWEST_ROWS, Profile
from attune.common.site_statistics import (
    ACCURACY,
    BUCKETS,
    Centre,
    ColumnSketch,
    ColumnSums,
    SiteSketches,
    SiteSums,
    bucket_value,
    output_columns,
)
from attune.fedserver.core.scale import can_be_joined, joined
from attune.fedserver.surveys.kaplan_meier import KaplanMeier, fleet_survival, is_within

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
BINS = 20  # of a histogram, before bins with too few rows or devices are joined
ALIKE, APART = 0.1, 0.25  # distance of class shares from the fleet's: below the first sites are alike, above the second not
SHIFTED = 0.1  # share of a column's variance that lies between sites, from which on sites differ in it


class Histogram(msgspec.Struct, frozen=True):
    """Counts of rows between edges, in ascending order. The outer bins reach to infinity."""

    edges: list[float]  # inner edges, one fewer than counts
    counts: list[int]


class Noise(msgspec.Struct, frozen=True):
    """Noise that the devices have added, each to its own sums.

    Attributes:
        unit: What each device protects.
        epsilon: Cost of the answer on each device.
        delta: Chance that the guarantee fails.
        error: Standard deviation of a count over all devices.
    """

    unit: str
    epsilon: float
    delta: float
    error: float


class ColumnErrors(msgspec.Struct, frozen=True):
    """Standard errors of a column's noisy figures, of the noise alone; None: the figure is withheld.

    Attributes:
        rows: Error of the number of rows with a value.
        missing: Error of the share of rows without one.
        mean: Error of the mean.
        deviation: Error of the standard deviation.
        quantiles: Error of each quantile, to which the width of the bins adds.
        bins: Error of each count of the histogram, or of each value of a category.
    """

    rows: float
    missing: float
    mean: float | None = None
    deviation: float | None = None
    quantiles: dict[str, float] | None = None
    bins: float | None = None


class ColumnStatistics(msgspec.Struct, frozen=True):
    """Statistics of one column over the fleet. None is withheld: too few devices or rows stand behind it.

    Attributes:
        devices: Devices with at least one value.
        rows: Rows with a value.
        missing: Share of the rows without one.
        quantiles: Value by share of the rows that lie at or below it.
        histogram: Counts of rows by value.
        between: Share of the variance that lies between sites, 0 to 1 (eta squared): 0 if all sites have one mean.
        values: Rows of each value of a category; only of noisy statistics.
        errors: Standard errors of noisy figures.
    """

    devices: int
    rows: int | None = None
    missing: float | None = None
    mean: float | None = None
    deviation: float | None = None
    quantiles: dict[str, float] | None = None
    histogram: Histogram | None = None
    between: float | None = None
    values: dict[str, int | None] | None = None
    errors: ColumnErrors | None = None


class FleetStatistics(msgspec.Struct, frozen=True):
    """Statistics of a fleet's data.

    Attributes:
        devices: Devices that answered.
        without: Devices that did not, each with the reason.
        samples: Samples of all of them, training and test parts (under noise on groups: groups); None: withheld.
        columns: Statistics of each column that a device has.
        classes: Samples of each class. None: withheld; a class with too few devices or samples is withheld by itself.
        class_distance: Mean distance of the sites' class shares from the fleet's, 0 to 1 (total variation), by samples.
        quantile_error: Largest error of a quantile, as a share of its distance from the mean; None: as `errors` say.
        first: Methods to try first on such data.
        why: Reason for them, in one sentence.
        noise: The noise in all numbers but `devices` and `samples`; None: there is none.
        withheld: What cannot be shown with noise, each with the reason.
        survival: Survival over time, where the data have times and events; None: there are none, or it is withheld.
        format: Version of this form.
    """

    devices: int
    without: dict[str, str]
    samples: int | None = None
    columns: dict[str, ColumnStatistics] = {}
    classes: dict[str, int | None] | None = None
    class_distance: float | None = None
    quantile_error: float | None = ACCURACY
    first: list[str] = []
    why: str = ""
    noise: Noise | None = None
    withheld: dict[str, str] = {}
    survival: KaplanMeier | None = None
    format: int = 1


def columns_of(profile: Profile) -> list[str]:
    """Return the names of the columns of which a device with this profile can give statistics."""
    width = profile.shape[-1] if profile.kind in ("tabular", "series") else 0
    features = list(profile.column_names) or [f"column {number + 1}" for number in range(width)]
    return features + output_columns(profile.task, profile.labels)


def survival_columns(profiles: Iterable[Profile]) -> list[str]:
    """Return the column of times and that of events, if all devices with survival have the same ones; else none."""
    pairs = {tuple(output_columns(profile.task, profile.labels)) for profile in profiles if profile.task == "survival"}
    return list(pairs.pop()) if len(pairs) == 1 else []


def check_sums(sums: SiteSums, profile: Profile) -> None:
    """Check what a device sent in the first pass against its profile.

    Raises:
        UpdateRefused: A shard of this profile cannot have such sums.
    """
    samples = profile.samples + profile.test_samples
    steps = profile.shape[0] if profile.kind == "series" else 1
    wrong = sums.samples != samples or not set(sums.columns) <= set(columns_of(profile))
    for column in sums.columns.values():
        wrong |= column.rows + column.missing > samples * steps
        wrong |= not can_be_joined(column.mean, column.squares)
    if sums.classes:
        labels = samples * (math.prod(profile.shape[:2]) if profile.per_position else 1)
        wrong |= profile.task != "classes" or len(sums.classes) != len(profile.labels) or sum(sums.classes) > labels
    if wrong:
        raise UpdateRefused("its sums are not those of the data that it declares")


def check_sketches(sketches: SiteSketches, sums: SiteSums, centres: Mapping[str, Centre], survival: Sequence[str] = ()) -> None:
    """Check what a device sent in the second pass against the first one.

    Args:
        sketches: What it sent.
        sums: Its answer in the first pass.
        centres: Centres that it was told.
        survival: Same as `survival_columns` returns.

    Raises:
        UpdateRefused: The two cannot be of the same data.
    """
    for name, sketch in sketches.columns.items():
        last = sketch.first + len(sketch.counts) - 1
        fits = name in centres and name in sums.columns and sum(sketch.counts) == sums.columns[name].rows
        if not fits or (sketch.counts and not -BUCKETS <= sketch.first <= last <= BUCKETS):
            raise UpdateRefused("its counts are not those of the data of which it sent the sums")
    times, events = (sketches.columns.get(name) for name in survival) if survival else (None, None)
    if events is not None and (times is None or not is_within(events, times)):
        raise UpdateRefused("it counts more events than rows at a time")


def centres_of(sites: Mapping[str, SiteSums], fewest: int = FEWEST_DEVICES, survival: Sequence[str] = ()) -> dict[str, Centre]:
    """Return mean and deviation of each column that may be shown; of events those of all times (`survival_columns`)."""
    centres = {}
    for name, columns in _by_column(sites).items():
        whole = reduce(_both, columns)
        if sum(column.rows > 0 for column in columns) >= fewest and whole.rows >= FEWEST_ROWS:
            centres[name] = Centre(whole.mean, math.sqrt(whole.squares / whole.rows))
    times, events = survival or ("", "")
    return centres | ({events: centres[times]} if events in centres and times in centres else {})


def fleet_statistics(
    sites: Mapping[str, SiteSums],
    sketches: Mapping[str, SiteSketches],
    profiles: Mapping[str, Profile],
    without: Mapping[str, str],
    fewest: int = FEWEST_DEVICES,
) -> FleetStatistics:
    """Return what may be shown of a fleet.

    Args:
        sites: Sums of each device.
        sketches: Sketches of those of them that answered in the second pass.
        profiles: Declaration of each of these devices.
        without: Devices without an answer, each with the reason.
        fewest: Least number of devices behind each number.
    """
    samples = sum(site.samples for site in sites.values())
    if len(sites) < fewest or samples < FEWEST_ROWS:
        why = f"withheld: statistics are sums over at least {fewest} devices and {FEWEST_ROWS} rows"
        return FleetStatistics(len(sites), dict(without), why=why)
    survival = survival_columns(profiles[name] for name in sites)
    centres = centres_of(sites, fewest, survival)
    columns = {}
    for name, sums in _by_column(sites).items():
        given = [site.columns[name] for site in sketches.values() if name in site.columns and name in centres]
        columns[name] = _statistics(sums, given, centres.get(name), fewest)
    classes, distance = _classes(sites, profiles, fewest)
    between = [column.between for column in columns.values() if column.between is not None]
    first, why = advice(distance, max(between, default=None))
    over_time = fleet_survival(sketches, centres, survival, fewest)
    return FleetStatistics(
        len(sites), dict(without), samples, columns, classes, distance, first=first, why=why, survival=over_time
    )


def _by_column(sites: Mapping[str, SiteSums]) -> dict[str, list[ColumnSums]]:
    """Return the sums of the devices that have the column, by column; devices in the order of their names."""
    names = dict.fromkeys(name for device in sorted(sites) for name in sites[device].columns)
    return {name: [sites[device].columns[name] for device in sorted(sites) if name in sites[device].columns] for name in names}


def _both(a: ColumnSums, b: ColumnSums) -> ColumnSums:
    """Return the sums of two sites together."""
    rows, missing = a.rows + b.rows, a.missing + b.missing
    if not rows:
        return ColumnSums(0, missing, 0.0, 0.0)
    return ColumnSums(rows, missing, *joined((a.rows, a.mean, a.squares), (b.rows, b.mean, b.squares)))


def _statistics(
    sums: Sequence[ColumnSums], sketches: Sequence[ColumnSketch], centre: Centre | None, fewest: int
) -> ColumnStatistics:
    devices = sum(column.rows > 0 for column in sums)
    if centre is None:
        return ColumnStatistics(devices)
    whole = reduce(_both, sums)
    between = sum(column.rows * (column.mean - whole.mean) ** 2 for column in sums)
    return column_statistics(devices, whole.rows, whole.missing, whole.mean, whole.squares, between, sketches, centre, fewest)


def column_statistics(
    devices: int,
    rows: int,
    missing: int,
    mean: float,
    squares: float | Fraction,
    between: float | Fraction,
    sketches: Sequence[ColumnSketch],
    centre: Centre,
    fewest: int,
) -> ColumnStatistics:
    """Return the statistics of a column, of sums in the clear or behind masks.

    `squares` are those of distances from the mean; `between` is the part of them that lies between devices.
    """
    quantiles, histogram = None, None
    if sum(bool(sketch.counts) for sketch in sketches) >= fewest:
        quantiles = quantiles_of(added_sketches(sketches), centre)
        histogram = histogram_of(sketches, centre, quantiles, fewest)
    return ColumnStatistics(
        devices,
        rows,
        missing / (rows + missing),
        mean,
        math.sqrt(squares / rows),
        quantiles,
        histogram,
        min(1.0, max(0.0, float(between / squares))) if squares else 0.0,
    )


def added_sketches(sketches: Sequence[ColumnSketch]) -> dict[int, int]:
    """Return the count of each bucket over all devices, in ascending order of the buckets."""
    counts: dict[int, int] = {}
    for sketch in sketches:
        for bucket, count in enumerate(sketch.counts, sketch.first):
            if count:
                counts[bucket] = counts.get(bucket, 0) + count
    return dict(sorted(counts.items()))


def quantiles_of(counts: Mapping[int, int], centre: Centre) -> dict[str, float]:
    """Return the quantiles beyond which, on either side, enough rows lie."""
    rows, below = sum(counts.values()), list(accumulate(counts.values()))
    result = {}
    for share in QUANTILES:
        rank = max(1, math.ceil(share * rows))
        if min(rank, rows - rank + 1) >= FEWEST_ROWS:
            bucket = next(bucket for bucket, upto in zip(counts, below, strict=True) if upto >= rank)
            result[f"{share:g}"] = bucket_value(bucket, centre)
    return result


def histogram_of(
    sketches: Sequence[ColumnSketch], centre: Centre, quantiles: Mapping[str, float], fewest: int
) -> Histogram | None:
    """Return counts in bins of one width, joined with their neighbours until enough rows and devices are in each."""
    if len(quantiles) < 2:
        return None
    low, high = min(quantiles.values()), max(quantiles.values())
    edges = [low + (high - low) * number / BINS for number in range(1, BINS)] if high > low else []
    counts = [0] * (len(edges) + 1)
    devices: list[set[int]] = [set() for _ in counts]
    for device, sketch in enumerate(sketches):
        for bucket, count in enumerate(sketch.counts, sketch.first):
            if count:
                place = sum(edge < bucket_value(bucket, centre) for edge in edges)
                counts[place] += count
                devices[place].add(device)
    return _joined(edges, counts, devices, fewest)


def _joined(edges: Sequence[float], counts: Sequence[int], devices: Sequence[set[int]], fewest: int) -> Histogram:
    inner: list[float] = []
    rows: list[int] = []
    behind: set[int] = set()
    count = 0
    for place, more in enumerate(counts):
        count, behind = count + more, behind | devices[place]
        if count >= FEWEST_ROWS and len(behind) >= fewest:
            rows.append(count)
            inner += edges[place : place + 1]
            count, behind = 0, set()
    if len(inner) == len(rows) and rows:  # what is left over joins the last bin
        inner.pop()
        rows[-1] += count
    return Histogram(inner, rows)


def _classes(
    sites: Mapping[str, SiteSums], profiles: Mapping[str, Profile], fewest: int
) -> tuple[dict[str, int | None] | None, float | None]:
    """Return the samples of each class, and the mean distance of the sites' shares from the fleet's."""
    by_device = {
        name: dict(zip(map(str, profiles[name].labels), site.classes, strict=True))
        for name, site in sites.items()
        if site.classes
    }
    if len(by_device) < fewest:
        return None, None
    labels = dict.fromkeys(label for name in sorted(by_device) for label in by_device[name])
    total = {label: sum(counts.get(label, 0) for counts in by_device.values()) for label in labels}
    whole = sum(total.values())
    if not whole:
        return None, None
    distance = 0.0
    for counts in by_device.values():
        if rows := sum(counts.values()):
            apart = sum(abs(counts.get(label, 0) / rows - total[label] / whole) for label in labels) / 2
            distance += apart * rows / whole
    holders = {label: sum(counts.get(label, 0) > 0 for counts in by_device.values()) for label in labels}
    return shown_classes({label: total[label] if holders[label] >= fewest else 0 for label in labels}), distance


def shown_classes(total: Mapping[str, int]) -> dict[str, int | None]:
    """Return the samples of each class; None where they are too few, and of one more class if they would follow from it."""
    shown = {label: count if count >= FEWEST_ROWS else None for label, count in total.items()}
    known = [(count, label) for label, count in shown.items() if count is not None]
    if known and len(known) == len(shown) - 1:  # the sum of all classes is known
        shown[min(known)[1]] = None
    return shown


def advice(distance: float | None, between: float | None) -> tuple[list[str], str]:
    """Return the methods to try first, and why."""
    if distance is not None and distance >= APART:
        return ["fedper", "fedtp"], "sites have different shares of the classes: a head or attention of their own pays"
    if between is not None and between >= SHIFTED:
        return ["fedmcsa", "fedtp"], "sites have other values of some columns: devices learn from those that are like them"
    if distance is None and between is None:
        return [], "too little is known of the data"
    if distance is None or distance < ALIKE:
        return ["fedavg"], "sites are alike: one model for all has the most data"
    return ["fedavg", "fedper"], "sites differ a little in their shares of the classes"
