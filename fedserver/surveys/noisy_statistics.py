"""The noised carrier of a fleet's statistics: what devices that add noise are asked for, and the sums of their releases."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from attune.common.config import PrivacySettings
from attune.common.errors import SettingError
from attune.common.plan import FEWEST_DEVICES, DataSettings, Profile
from attune.common.schema import Schema
from attune.common.site_statistics import MOMENTS, NoisyColumn, NoisyLayout, NoisySums, output_columns
from attune.common.text import clean, listed
from attune.fedserver.surveys.fleet_statistics import (
    ColumnTotals,
    FleetStatistics,
    FleetSums,
    Noise,
    columns_of,
    fleet_statistics,
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
    noise = Noise(layout.unit, layout.epsilon, layout.delta, math.sqrt(sum(sums.deviation**2 for sums in answers.values())))
    places = [math.fsum(place) for place in zip(*(sums.values for sums in answers.values()), strict=True)]
    total, columns = iter(places or [0.0] * layout.size), {}
    for name, form in layout.columns.items():
        values = [next(total) for _ in range(form.places)]
        moments, bins = (values[:MOMENTS], values[MOMENTS:]) if form.range is not None else ([math.fsum(values), 0, 0], values)
        rows, of_v, of_squares = moments
        columns[name] = ColumnTotals(form, devices, rows, units - rows, of_v, of_squares, bins=bins)
    classes = {label: next(total) for label in layout.classes}
    return fleet_statistics(FleetSums(devices, units, columns, classes, noise=noise, fewest=fewest), without, withheld)
