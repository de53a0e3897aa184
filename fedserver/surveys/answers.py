"""Answers of a fleet's devices to questions for statistics: clear, masked or noised ones are checked and added up."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from statistics import median

import msgspec

from attune.common.errors import UpdateRefused
from attune.common.exchange.messages import FixedSurvivors
from attune.common.plan import FEWEST_DEVICES, FEWEST_ROWS, Profile, Scale
from attune.common.secure.masked_sums import SlotValue, unpacked
from attune.common.site_statistics import (
    BUCKETS,
    MOMENTS,
    Centre,
    ColumnSketch,
    ColumnSums,
    MaskedLayout,
    NoisyLayout,
    NoisySums,
    SiteSketches,
    SiteSums,
)
from attune.common.task import TIME_AND_EVENT
from attune.fedserver.core.scale import Scales, can_be_joined
from attune.fedserver.surveys.fleet_statistics import ColumnTotals, FleetStatistics, FleetSums, Noise, fleet_statistics
from attune.fedserver.surveys.kaplan_meier import KaplanMeier, fleet_survival, is_within, kaplan_meier
from attune.fedserver.surveys.layouts import NO_RANGE, columns_of, survival_columns

NOT_A_SUM = "the masked sum is no sum of statistics: a device has sent something else, and nobody knows which"
OTHER_NOISE = "its noise is not that of the other devices: it lies, or needs an update"
ALIKE = 0.05  # relative difference of two accountants' noise


# --- clear: each device's own sums and counts, in two passes


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


def centres_of(sites: Mapping[str, SiteSums], survival: Sequence[str] = ()) -> dict[str, Centre]:
    """Return mean and deviation of each column that may be shown; of events those of all times (`survival_columns`)."""
    centres = {}
    for name, columns in _by_column(sites).items():
        whole = _totals(columns, NO_RANGE)
        if whole.devices >= FEWEST_DEVICES and whole.rows >= FEWEST_ROWS:
            mean = whole.total / whole.rows
            centres[name] = Centre(float(mean), math.sqrt(whole.squares / whole.rows - mean * mean))
    times, events = survival or ("", "")
    return centres | ({events: centres[times]} if events in centres and times in centres else {})


def clear_fleet(
    sites: Mapping[str, SiteSums],
    sketches: Mapping[str, SiteSketches],
    profiles: Mapping[str, Profile],
    without: Mapping[str, str],
) -> FleetStatistics:
    """Return what may be shown of a fleet.

    Args:
        sites: Sums of each device.
        sketches: Sketches of those of them that answered in the second pass.
        profiles: Declaration of each of these devices.
        without: Devices without an answer, each with the reason.
    """
    survival = survival_columns(profiles[name] for name in sites)
    centres = centres_of(sites, survival)
    columns = {}
    for name, sums in _by_column(sites).items():
        given = [site.columns[name] for site in sketches.values() if name in site.columns and name in centres]
        columns[name] = _totals(sums, centres.get(name, NO_RANGE), given)
    classes, distance = _classes(sites, profiles)
    over_time = fleet_survival(sketches, centres, survival, FEWEST_DEVICES)
    samples = sum(site.samples for site in sites.values())
    return fleet_statistics(FleetSums(len(sites), samples, columns, classes, distance, over_time), without)


def _by_column(sites: Mapping[str, SiteSums]) -> dict[str, list[ColumnSums]]:
    """Return the sums of the devices that have the column, by column; devices in the order of their names."""
    names = dict.fromkeys(name for device in sorted(sites) for name in sites[device].columns)
    return {name: [sites[device].columns[name] for device in sorted(sites) if name in sites[device].columns] for name in names}


def _totals(columns: Sequence[ColumnSums], centre: Centre, sketches: Sequence[ColumnSketch] = ()) -> ColumnTotals:
    """Return the sums of one column over its devices, of distances from the centre: exact ones, so large squares do no harm."""
    held = [(column.rows, Fraction(column.mean) - Fraction(centre.mean)) for column in columns if column.rows]
    between, squares = sum(rows * gap * gap for rows, gap in held), sum(Fraction(column.squares) for column in columns)
    rows, missing = sum(rows for rows, _ in held), sum(column.missing for column in columns)
    total = sum(rows * gap for rows, gap in held)
    return ColumnTotals(centre, len(held), rows, missing, Fraction(total), squares + between, Fraction(between), sketches)


def _classes(sites: Mapping[str, SiteSums], profiles: Mapping[str, Profile]) -> tuple[dict[str, int], float | None]:
    """Return the samples of each class that enough devices have, and the mean distance of the sites' shares from all."""
    by_device = {
        name: dict(zip(map(str, profiles[name].labels), site.classes, strict=True))
        for name, site in sites.items()
        if site.classes
    }
    if len(by_device) < FEWEST_DEVICES:
        return {}, None
    labels = dict.fromkeys(label for name in sorted(by_device) for label in by_device[name])
    total = {label: sum(counts.get(label, 0) for counts in by_device.values()) for label in labels}
    whole = sum(total.values())
    if not whole:
        return {}, None
    distance = 0.0
    for counts in by_device.values():
        if rows := sum(counts.values()):
            apart = sum(abs(counts.get(label, 0) / rows - total[label] / whole) for label in labels) / 2
            distance += apart * rows / whole
    holders = {label: sum(counts.get(label, 0) > 0 for counts in by_device.values()) for label in labels}
    return {label: total[label] if holders[label] >= FEWEST_DEVICES else 0 for label in labels}, distance


# --- masked


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


# --- noised


def noisy_fleet(
    layout: NoisyLayout,
    answers: Mapping[str, NoisySums],
    without: Mapping[str, str],
    withheld: Mapping[str, str],
) -> FleetStatistics:
    """Return what may be shown of a fleet whose devices have added noise.

    Args:
        layout: What was asked for.
        answers: Release of each device.
        without: Devices without one, each with the reason.
        withheld: What was not asked for, each with the reason.
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
    return fleet_statistics(FleetSums(devices, units, columns, classes, noise=noise), without, withheld)
