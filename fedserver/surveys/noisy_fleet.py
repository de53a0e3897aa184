"""Statistics of a fleet's data whose devices add noise: what they are asked for, and the figures with their errors.

Notation: each number of the summed releases has noise of the standard deviation s. n is the count of a column that is scaled to
v from -1 to 1; r = (sum of v) / n, and q = (sum of v^2) / n. Errors are those of the delta method, to the first order in s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Literal

from attune.common.config import PrivacySettings
from attune.common.errors import SettingError
from attune.common.plan import FEWEST_DEVICES, FEWEST_ROWS, DataSettings, Profile
from attune.common.privacy.noisy_statistics import BINS, MOMENTS, NoisyColumn, NoisyLayout, NoisySums
from attune.common.schema import Schema
from attune.common.site_statistics import output_columns
from attune.common.text import clean, listed
from attune.fedserver.surveys.fleet_statistics import (
    QUANTILES,
    ColumnErrors,
    ColumnStatistics,
    FleetStatistics,
    Histogram,
    Noise,
    columns_of,
)

NO_RANGE = "it has no public range (`range` in the schema, privacy.ranges or privacy.target_ranges)"
BETWEEN = "noise of each site would look like a difference"
OTHER_NOISE = "its noise is not that of the other devices: it lies, or needs an update"
ALIKE = 0.05  # relative difference of two accountants' noise
UNDECLARED = "declare them (data.classes): which ones occur tells of the data"
NO_SURVIVAL = "times and events have no noisy sums, since survival cannot be trained with noise on the devices"
NOTHING = "there is nothing to ask for with noise: give columns a `range` in the operator's schema, or declare data.classes"


@dataclass(frozen=True)
class NoisyQuestions:
    """Questions for noisy statistics of one federation.

    Attributes:
        federation: Its fingerprint.
        privacy: The section [privacy].
        data: The section [data].
    """

    federation: str
    privacy: PrivacySettings
    data: DataSettings

    def layout(self, profiles: Mapping[str, Profile], wanted: Sequence[str]) -> tuple[NoisyLayout, dict[str, str]]:
        """Return what these devices are asked for, and what is withheld, with the reasons.

        It depends on declarations alone, so that the same question at another time is the same, and costs nothing again.

        Args:
            profiles: What the devices declare.
            wanted: Names of columns; empty: all.

        Raises:
            SettingError: A column is not known, or cannot be released; or nothing can.
        """
        columns, withheld = self._columns(list(profiles.values()))
        for name in wanted:
            if name not in columns:
                raise SettingError(
                    f"the column {clean(name)!r} has no noisy statistics: {withheld.get(name, 'no schema has it')}"
                )
        classes: list[str] = []
        if all(profile.task == "classes" and not profile.per_position for profile in profiles.values()):
            classes = [str(label) for label in self.data.classes]
            withheld |= {} if classes else {"classes": UNDECLARED}
        columns = {name: columns[name] for name in sorted(wanted or columns)}
        if not columns and not classes:
            raise SettingError(f"{NOTHING} ({'; '.join(f'{name}: {why}' for name, why in withheld.items())})")
        unit: Literal["example", "group"] = "group" if self.privacy.unit == "group" else "example"
        epsilon = self.privacy.statistics_epsilon or 0.0
        layout = NoisyLayout(self.federation, unit, epsilon, self.privacy.delta, self.privacy.epsilon, columns, classes)
        return layout, withheld | {"differences between sites": BETWEEN}

    def _columns(self, profiles: Sequence[Profile]) -> tuple[dict[str, NoisyColumn], dict[str, str]]:
        """Return the columns that have public ranges or values, and why others are withheld."""
        columns: dict[str, NoisyColumn] = {}
        schemas = {profile.schema.digest: profile.schema for profile in profiles if isinstance(profile.schema, Schema)}
        schema = self.data.schema or (next(iter(schemas.values())) if len(schemas) == 1 else None)
        names = [] if schema is not None else self.data.names or _same([columns_of(profile) for profile in profiles])
        outputs = _same([output_columns(profile.task, profile.labels) for profile in profiles])
        survival = any(profile.task == "survival" for profile in profiles)
        targets = [] if survival else outputs
        if schema is not None:
            used = schema.used
            columns = {name: NoisyColumn(values=column.values) for name, column in used.items() if column.values}
            columns |= {name: NoisyColumn(column.range) for name, column in used.items() if column.range and not column.values}
            names = list(used)
        elif all(profile.kind == "tabular" for profile in profiles):
            names = [name for name in names if name not in outputs]
            columns = _ranged(names, self.privacy.ranges, "privacy.ranges")
        columns |= _ranged(targets, self.privacy.target_ranges, "privacy.target_ranges")
        withheld = {name: NO_RANGE for name in [*names, *targets] if name not in columns}
        return columns, withheld | ({"survival": NO_SURVIVAL} if survival else {})


def _same(lists: Sequence[list[str]]) -> list[str]:
    """Return the names that all devices declare alike; none if they differ."""
    return lists[0] if lists and all(names == lists[0] for names in lists) else []


def _ranged(names: Sequence[str], ranges: Sequence[tuple[float, float]], setting: str) -> dict[str, NoisyColumn]:
    if ranges and names and len(ranges) not in (1, len(names)):
        raise SettingError(f"{setting} has {len(ranges)} ranges, and the data have {len(names)} columns: {listed(names)}")
    pairs = [*ranges] * (len(names) if len(ranges) == 1 else 1)
    return {name: NoisyColumn(bounds) for name, bounds in zip(names, pairs, strict=False)}


def noisy_fleet(
    layout: NoisyLayout,
    answers: Mapping[str, NoisySums],
    without: Mapping[str, str],
    withheld: Mapping[str, str],
    fewest: int = FEWEST_DEVICES,
) -> FleetStatistics:
    """Return what may be shown of a fleet whose devices have added noise.

    Args:
        layout: What was asked for.
        answers: Release of each device.
        without: Devices without one, each with the reason.
        withheld: What was not asked for, each with the reason.
        fewest: Least number of devices behind each number.
    """
    usual = median(sums.deviation for sums in answers.values()) if answers else 0.0  # all calculate it from the layout
    odd = [name for name, sums in answers.items() if not abs(sums.deviation / usual - 1) <= ALIKE]
    without = {**without, **dict.fromkeys(odd, OTHER_NOISE)}
    answers = {name: sums for name, sums in answers.items() if name not in odd}
    devices, units = len(answers), sum(sums.units for sums in answers.values())
    error = math.sqrt(sum(sums.deviation**2 for sums in answers.values()))
    noise = Noise(layout.unit, layout.epsilon, layout.delta, error)
    if devices < fewest or units < FEWEST_ROWS:
        why = f"withheld: statistics are sums over at least {fewest} devices and {FEWEST_ROWS} rows"
        return FleetStatistics(devices, dict(without), why=why, noise=noise, withheld=dict(withheld))
    total = iter([math.fsum(place) for place in zip(*(sums.values for sums in answers.values()), strict=True)])
    columns = {}
    for name, column in layout.columns.items():
        values = [next(total) for _ in range(column.places)]
        columns[name] = (
            _category(values, column.values, devices, units, error)
            if column.range is None
            else _number(values, column.range, devices, units, error)
        )
    classes = {label: _count(next(total)) for label in layout.classes} or None
    return FleetStatistics(
        devices,
        dict(without),
        units,
        columns,
        classes,
        quantile_error=None,
        why="how the sites differ is not known beside noise",
        noise=noise,
        withheld=dict(withheld),
    )


def _count(value: float) -> int | None:
    """Return a count of rows; None if it is too small to be shown."""
    return round(value) if value >= FEWEST_ROWS else None


def _category(values: Sequence[float], names: Sequence[str], devices: int, units: int, error: float) -> ColumnStatistics:
    rows, deviation = math.fsum(values), error * math.sqrt(len(values))
    if rows < FEWEST_ROWS:
        return ColumnStatistics(devices)
    counts = {name: _count(value) for name, value in zip([*names, "other"], values, strict=True)}
    errors = ColumnErrors(deviation, deviation / units, bins=error)
    return ColumnStatistics(devices, round(rows), _share(units - rows, units), values=counts, errors=errors)


def _number(values: Sequence[float], bounds: tuple[float, float], devices: int, units: int, error: float) -> ColumnStatistics:
    """Return the statistics of a number with public bounds.

    mean = middle + half r, with the error (half s / n) sqrt(1 + r^2). variance = half^2 (q - r^2), with the error
    (half^2 s / n) sqrt(1 + 4 r^2 + (q - 2 r^2)^2); a deviation's is that over twice itself.
    """
    count, total, squares = values[:MOMENTS]
    if count < max(FEWEST_ROWS, 2 * error):
        return ColumnStatistics(devices, errors=ColumnErrors(error, error / units))
    middle, half = (bounds[0] + bounds[1]) / 2, (bounds[1] - bounds[0]) / 2
    r, q = total / count, squares / count
    spread = max(0.0, q - r * r)
    spread_error = error / count * math.sqrt(1 + 4 * r * r + (q - 2 * r * r) ** 2)
    is_clear = spread > spread_error
    bins = _agreed(values[MOMENTS:], count)
    width = (bounds[1] - bounds[0]) / BINS
    quantiles, quantile_errors = _quantiles(bins, bounds[0], width, error)
    return ColumnStatistics(
        devices,
        round(count),
        _share(units - count, units),
        min(bounds[1], max(bounds[0], middle + half * r)),
        half * math.sqrt(spread) if is_clear else None,
        quantiles,
        Histogram([bounds[0] + width * at for at in range(1, BINS)], [max(0, round(value)) for value in bins]),
        errors=ColumnErrors(
            error,
            error / units,
            half * error / count * math.sqrt(1 + r * r),
            half * spread_error / (2 * math.sqrt(spread)) if is_clear else None,
            quantile_errors,
            error,
        ),
    )


def _share(part: float, whole: int) -> float:
    return min(1.0, max(0.0, part / whole))


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
