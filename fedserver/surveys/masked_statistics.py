"""A masked sum of the devices' statistics: its layout, and what is read out of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

import msgspec

from attune.common.errors import SettingError, UpdateRefused
from attune.common.exchange.messages import FixedSurvivors
from attune.common.plan import Profile, Scale
from attune.common.schema import Schema
from attune.common.secure.masked_sums import SlotValue, unpacked
from attune.common.site_statistics import BUCKETS, MOST_COLUMNS, Centre, ColumnSketch, MaskedLayout, output_columns
from attune.common.task import TIME_AND_EVENT
from attune.common.text import clean
from attune.fedserver.core.scale import Scales
from attune.fedserver.surveys.fleet_statistics import (
    NO_RANGE,
    ColumnTotals,
    FleetStatistics,
    FleetSums,
    columns_of,
    fleet_statistics,
)
from attune.fedserver.surveys.kaplan_meier import KaplanMeier, is_within, kaplan_meier

NOT_A_SUM = "the masked sum is no sum of statistics: a device has sent something else, and nobody knows which"
ZERO = Fraction(0)


class KeptSum(msgspec.Struct, frozen=True):
    """The one masked sum of a home, once its survivors are fixed. It stays from run to run.

    Attributes:
        id: The id of the question.
        layout: Its layout.
        fixed: From which the sum can be unmasked.
        number: The sum, little-endian.
        is_masked: Whether masks are still on it.
    """

    id: str
    layout: MaskedLayout
    fixed: FixedSurvivors
    number: bytes
    is_masked: bool = True


def layout_of(
    federation: str, profiles: Mapping[str, Profile], wanted: Sequence[str], for_scales: bool = False
) -> tuple[MaskedLayout, dict[str, str]]:
    """Return the layout of a masked sum over these devices, and why others of them cannot take part.

    Every device fills every slot. So the columns are those that more than half of the devices have, or those that are wanted.
    Classes, features and targets are in it if all that remain declare the same ones. A sum `for_scales` leaves columns out
    that are too many.

    Raises:
        SettingError: Too many columns are meant.
    """
    holders = Counter(column for name in sorted(profiles) for column in dict.fromkeys(columns_of(profiles[name])))
    names = list(wanted) or [name for name in holders if 2 * holders[name] > len(profiles)]
    if len(names) > MOST_COLUMNS and for_scales:
        names = []
    if len(names) > MOST_COLUMNS:
        raise SettingError(f"the data have {len(names)} columns: ask for at most {MOST_COLUMNS} of them (--columns)")
    lacking = {name: [column for column in names if column not in columns_of(profile)] for name, profile in profiles.items()}
    without = {name: f"it has no column {clean(gone[0])!r} of the masked sum" for name, gone in lacking.items() if gone}
    sites = [profile for name, profile in profiles.items() if name not in without]
    classes = {tuple(map(str, site.labels)) if site.task == "classes" else () for site in sites}
    features = {() if site.proposal is not msgspec.UNSET else tuple(scaled_of(site)[0]) for site in sites}
    targets = {tuple(scaled_of(site)[1]) for site in sites}
    ranges = _ranges(sites)
    layout = MaskedLayout(
        federation,
        {name: ranges.get(name, NO_RANGE) for name in names},
        *(list(names.pop()) if len(names) == 1 else [] for names in (classes, features, targets)),
    )
    return layout, without


def scaled_of(profile: Profile) -> tuple[list[str], list[str]]:
    """Return the names of the features and of the numbers to predict that may have a common scale."""
    targets = list(map(str, profile.labels)) if profile.task == "regression" else []
    columns = columns_of(profile)
    return columns[: len(columns) - len(output_columns(profile.task, profile.labels))], targets


def _ranges(sites: Sequence[Profile]) -> dict[str, Centre]:
    """Return centres by the ranges of the schema that all sites have."""
    schemas = [site.schema for site in sites]
    first = schemas[0] if schemas else None
    if not isinstance(first, Schema) or any(schema != first for schema in schemas):
        return {}
    ranges = {name: column.range for name, column in first.columns.items() if column.range is not None}
    return {name: Centre((low + high) / 2, (high - low) / 4) for name, (low, high) in ranges.items()}


class SumReader:
    """Reader of an unmasked sum.

    Args:
        kept: The sum, without masks.

    Raises:
        UpdateRefused: It is no sum of so many devices' statistics.

    Attributes:
        scales: Common scales for standardisation.
    """

    def __init__(self, kept: KeptSum) -> None:
        self._layout, self._devices = kept.layout, len(kept.fixed.survivors)
        slots = iter(unpacked(kept.layout, kept.number, self._devices))
        self._samples = int(next(slots))
        self._classes = {label: int(next(slots)) for label in kept.layout.classes}
        self._columns = {name: _column(slots, centre, self._devices) for name, centre in kept.layout.columns.items()}
        self.scales = Scales(_scale(slots, len(kept.layout.features)), _scale(slots, len(kept.layout.targets)))

    def statistics(self, wanted: Sequence[str], without: Mapping[str, str]) -> FleetStatistics:
        """Return what may be shown of these columns, or of all."""
        columns = {name: column for name, column in self._columns.items() if not wanted or name in wanted}
        survival = self._survival(columns)
        sums = FleetSums(self._devices, self._samples, columns, self._classes, survival=survival, fewest=1)
        return fleet_statistics(sums, without)

    def _survival(self, columns: Mapping[str, ColumnTotals]) -> KaplanMeier | None:
        """Return the survival by the columns of all times and of events. A layout says no task, so their names and sums do."""
        times, events = ([name for name in columns if name.startswith(f"{what} ")] for what in TIME_AND_EVENT)
        pairs = [(columns[time], columns[event]) for time in times for event in events]
        pairs = [(time, event) for time, event in pairs if self._is_survival(time, event)]
        if len(pairs) != 1 or not isinstance(centre := pairs[0][0].form, Centre):
            return None
        return kaplan_meier(pairs[0][0].sketches, pairs[0][1].sketches, centre, 1)

    def _is_survival(self, time: ColumnTotals, event: ColumnTotals) -> bool:
        same = time.form == event.form and not self._layout.classes and not self._layout.targets
        return same and time.rows == self._samples and is_within(event.sketches[0], time.sketches[0])


def _column(slots: Iterator[SlotValue], centre: Centre, devices: int) -> ColumnTotals:
    rows, missing = int(next(slots)), int(next(slots))
    total, squares, between = (Fraction(next(slots)) for _ in range(3))
    sketch = ColumnSketch(-BUCKETS, [int(next(slots)) for _ in range(2 * BUCKETS + 1)])
    if rows < devices or sum(sketch.counts) != rows:
        raise UpdateRefused(NOT_A_SUM)
    return ColumnTotals(centre, devices, rows, missing, total, squares, between, [sketch])


def _scale(slots: Iterator[SlotValue], count: int) -> Scale | None:
    rows = int(next(slots))
    sums = [(Fraction(next(slots)), Fraction(next(slots))) for _ in range(count)]
    if not sums:
        return None
    if not rows:
        raise UpdateRefused(NOT_A_SUM)
    deviations = [math.sqrt(max(Fraction(0), square - total**2 / rows) / rows) for total, square in sums]
    return Scale([float(total / rows) for total, _ in sums], [deviation or 1.0 for deviation in deviations])
