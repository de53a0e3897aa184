"""The clear carrier of a fleet's statistics: each device's own sums and counts, in two passes, checked and added up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from attune.common.errors import UpdateRefused
from attune.common.plan import FEWEST_DEVICES, FEWEST_ROWS, Profile
from attune.common.site_statistics import (
    BUCKETS,
    Centre,
    ColumnSketch,
    ColumnSums,
    SiteSketches,
    SiteSums,
    output_columns,
)
from attune.fedserver.core.scale import can_be_joined
from attune.fedserver.surveys.fleet_statistics import (
    NO_RANGE,
    ColumnTotals,
    FleetStatistics,
    FleetSums,
    columns_of,
    fleet_statistics,
)
from attune.fedserver.surveys.kaplan_meier import fleet_survival, is_within


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
        labels = samples * (profile.shape[0] if profile.per_position else 1)
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
        whole = _totals(columns, NO_RANGE)
        if whole.devices >= fewest and whole.rows >= FEWEST_ROWS:
            mean = whole.total / whole.rows
            centres[name] = Centre(float(mean), math.sqrt(whole.squares / whole.rows - mean * mean))
    times, events = survival or ("", "")
    return centres | ({events: centres[times]} if events in centres and times in centres else {})


def clear_fleet(
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
    survival = survival_columns(profiles[name] for name in sites)
    centres = centres_of(sites, fewest, survival)
    columns = {}
    for name, sums in _by_column(sites).items():
        given = [site.columns[name] for site in sketches.values() if name in site.columns and name in centres]
        columns[name] = _totals(sums, centres.get(name, NO_RANGE), given)
    classes, distance = _classes(sites, profiles, fewest)
    over_time, samples = fleet_survival(sketches, centres, survival, fewest), sum(site.samples for site in sites.values())
    return fleet_statistics(FleetSums(len(sites), samples, columns, classes, distance, over_time, fewest=fewest), without)


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


def _classes(
    sites: Mapping[str, SiteSums], profiles: Mapping[str, Profile], fewest: int
) -> tuple[dict[str, int], float | None]:
    """Return the samples of each class that enough devices have, and the mean distance of the sites' shares from all."""
    by_device = {
        name: dict(zip(map(str, profiles[name].labels), site.classes, strict=True))
        for name, site in sites.items()
        if site.classes
    }
    if len(by_device) < fewest:
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
    return {label: total[label] if holders[label] >= fewest else 0 for label in labels}, distance
