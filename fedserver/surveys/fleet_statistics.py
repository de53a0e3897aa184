"""Figures of a fleet's data before training: what may be shown of sums over its devices, clear, masked or noised.

Every number that is shown is a sum over at least FEWEST_DEVICES devices and FEWEST_ROWS rows, or is withheld.

Notation: if there is noise, each number of the sums has noise of the standard deviation s. n is the count of a column that is
scaled to v; r = (sum of v) / n, and q = (sum of v^2) / n. Errors are those of the delta method, to the first order in s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate

import msgspec

from attune.common.plan import FEWEST_DEVICES, FEWEST_ROWS
from attune.common.site_statistics import ACCURACY, BINS, Centre, ColumnSketch, NoisyColumn, bucket_value
from attune.fedserver.surveys.kaplan_meier import KaplanMeier

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
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


@dataclass(frozen=True)
class ColumnTotals:
    """Numbers of one column, added over devices. The values are scaled by `form`: from a centre, or to -1 to 1 in a range.

    Attributes:
        form: How the column is counted.
        devices: Devices with at least one value.
        rows: Rows with a value.
        missing: Rows without one.
        total: Sum of the values.
        squares: Sum of their squares.
        between: Sum over the devices of (sum of the values)^2 / rows; None: it is not known.
        sketches: Counts by bucket, of each device that the server knows by itself, or of all together.
        bins: Counts by bin of a range, or by value of a category.
    """

    form: Centre | NoisyColumn
    devices: int
    rows: float
    missing: float
    total: float | Fraction = 0.0
    squares: float | Fraction = 0.0
    between: float | Fraction | None = None
    sketches: Sequence[ColumnSketch] = ()
    bins: Sequence[float] = ()


@dataclass(frozen=True)
class FleetSums:
    """Numbers of a layout, added over devices.

    Attributes:
        devices: Devices that are in the sums.
        samples: Their samples, or under noise their units.
        columns: Sums by the name of the column.
        classes: Samples of each class; one with too few devices has none.
        class_distance, survival, noise: Same as in FleetStatistics.
        fewest: Least number of devices behind each number. A sum that is of so many in any case has 1.
    """

    devices: int
    samples: int
    columns: Mapping[str, ColumnTotals] = field(default_factory=dict)
    classes: Mapping[str, float] = field(default_factory=dict)
    class_distance: float | None = None
    survival: KaplanMeier | None = None
    noise: Noise | None = None
    fewest: int = FEWEST_DEVICES


def fleet_statistics(sums: FleetSums, without: Mapping[str, str], withheld: Mapping[str, str] | None = None) -> FleetStatistics:
    """Return what may be shown of a fleet.

    Args:
        sums: The sums over its devices.
        without: Devices without an answer, each with the reason.
        withheld: What was not asked for, each with the reason.
    """
    shown = FleetStatistics(sums.devices, dict(without), noise=sums.noise, withheld=dict(withheld or {}))
    if sums.devices < sums.fewest or sums.samples < FEWEST_ROWS:
        why = f"withheld: statistics are sums over at least {sums.fewest} devices and {FEWEST_ROWS} rows"
        return msgspec.structs.replace(shown, why=why)
    columns = {name: _figures(column, sums) for name, column in sums.columns.items()}
    between = [column.between for column in columns.values() if column.between is not None]
    first, why = advice(sums.class_distance, max(between, default=None))
    if sums.noise is not None:
        first, why = [], "how the sites differ is not known beside noise"
    return msgspec.structs.replace(
        shown,
        samples=sums.samples,
        columns=columns,
        classes=shown_classes(sums.classes, sums.noise is None) if sums.classes else None,
        class_distance=sums.class_distance,
        quantile_error=ACCURACY if sums.noise is None else None,
        first=first,
        why=why,
        survival=sums.survival,
    )


def _figures(column: ColumnTotals, fleet: FleetSums) -> ColumnStatistics:
    """Return the figures of a column.

    mean = middle + half r, with the error (half s / n) sqrt(1 + r^2). variance = half^2 (q - r^2), with the error
    (half^2 s / n) sqrt(1 + 4 r^2 + (q - 2 r^2)^2); a deviation's is that over twice itself.
    """
    error, units, n = fleet.noise.error if fleet.noise is not None else 0.0, fleet.samples, column.rows
    form, missing = column.form, _share(column.missing, n + column.missing)
    if isinstance(form, NoisyColumn) and form.range is None:
        return _category(column, form.values, missing, units, error)
    if column.devices < fleet.fewest or n < max(FEWEST_ROWS, 2 * error):
        return ColumnStatistics(column.devices, errors=ColumnErrors(error, error / units) if error else None)
    (middle, half), r, q = (
        form.unit,
        column.total / n,
        column.squares / n,
    )  # of exact sums they are exact, and so is what they differ by
    spread = max(0.0, q - r * r)
    shown = ColumnStatistics(column.devices, round(n), missing, float(middle + half * r), half * math.sqrt(spread))
    if isinstance(form, Centre):
        quantiles, histogram = None, None
        if sum(bool(sketch.counts) for sketch in column.sketches) >= fleet.fewest:
            quantiles = quantiles_of(added_sketches(column.sketches), form)
            histogram = histogram_of(column.sketches, form, quantiles, fleet.fewest)
        apart = None if column.between is None else column.between / n - r * r
        between = apart if apart is None else min(1.0, max(0.0, float(apart / spread))) if spread else 0.0
        return msgspec.structs.replace(shown, quantiles=quantiles, histogram=histogram, between=between)
    low, high = form.range or (0.0, 1.0)
    bins, width = _agreed(column.bins, n), (high - low) / BINS
    quantiles, quantile_errors = _quantiles(bins, low, width, error)
    spread_error = error / n * math.sqrt(1 + 4 * r * r + (q - 2 * r * r) ** 2)
    is_clear = spread > spread_error
    return msgspec.structs.replace(
        shown,
        mean=min(high, max(low, float(middle + half * r))),
        deviation=shown.deviation if is_clear else None,
        quantiles=quantiles,
        histogram=Histogram([low + width * at for at in range(1, BINS)], [max(0, round(value)) for value in bins]),
        errors=ColumnErrors(
            error,
            error / units,
            half * error / n * math.sqrt(1 + r * r),
            half * spread_error / (2 * math.sqrt(spread)) if is_clear else None,
            quantile_errors,
            error,
        ),
    )


def _category(column: ColumnTotals, names: Sequence[str], missing: float, units: int, error: float) -> ColumnStatistics:
    if column.rows < FEWEST_ROWS:
        return ColumnStatistics(column.devices)
    deviation = error * math.sqrt(len(column.bins))
    counts = {name: _count(value) for name, value in zip([*names, "other"], column.bins, strict=True)}
    errors = ColumnErrors(deviation, deviation / units, bins=error)
    return ColumnStatistics(column.devices, round(column.rows), missing, values=counts, errors=errors)


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole else 0.0


def _count(value: float) -> int | None:
    """Return a count of rows; None if it is too small to be shown."""
    return round(value) if value >= FEWEST_ROWS else None


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


def _agreed(bins: Sequence[float], count: float) -> list[float]:
    """Return the counts of the bins, with the count of the column: the least squares estimate of both."""
    more = (count - math.fsum(bins)) / (len(bins) + 1)
    return [value + more for value in bins]


def _quantiles(bins: Sequence[float], low: float, width: float, error: float) -> tuple[dict[str, float], dict[str, float]]:
    """Return the quantiles within the bins, and their errors. Those with few rows on one side are left out.

    With k bins below, the sum of them minus the quantile's share p of all B bins has the variance s^2 times
    k - 2 p k + p^2 B - (k - p B)^2 / (B + 1). Over the density of the bin it is a distance. Within a bin rows are taken as
    spread evenly: that adds width^2 / 12.
    """
    below = list(accumulate(bins))
    rows = below[-1]
    upper, lower = list(accumulate(below, max)), list(accumulate(reversed(below), min))[::-1]
    rising = [0.0, *(max(0.0, (a + b) / 2) for a, b in zip(upper, lower, strict=True))]  # noise can make counts negative
    values, errors = {}, {}
    for share in QUANTILES:
        rank = share * rows
        if min(rank, rows - rank) < max(FEWEST_ROWS, 2 * error):
            continue
        at = next((place for place in range(len(bins)) if rising[place + 1] >= rank), len(bins) - 1)
        inside = rising[at + 1] - rising[at]
        part = min(1.0, max(0.0, (rank - rising[at]) / inside)) if inside > 0 else 0.5
        k, many = at + part, len(bins)
        variance = k - 2 * share * k + share**2 * many - (k - share * many) ** 2 / (many + 1)
        distance = error * math.sqrt(max(0.0, variance)) * width / max(inside, error)
        values[f"{share:g}"] = low + (at + part) * width
        errors[f"{share:g}"] = math.sqrt(distance**2 + width**2 / 12)
    return values, errors


def shown_classes(total: Mapping[str, float], is_exact: bool) -> dict[str, int | None]:
    """Return the samples of each class; None where they are too few, and of one more class if they would follow from it."""
    shown = {label: _count(count) for label, count in total.items()}
    known = [(count, label) for label, count in shown.items() if count is not None]
    if is_exact and known and len(known) == len(shown) - 1:  # the sum of all classes is known
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
