"""Federation-wide means and standard deviations of columns, from the sums of each device. No sample leaves a device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from statistics import median, median_low

import msgspec

from attune.common.config import PrivacySettings
from attune.common.errors import SettingError
from attune.common.plan import Columns, Profile, Scale
from attune.common.schema import Schema
from attune.common.text import listed
from attune.fedserver.core.voices import FEWEST_VOTES, MOST_VOTE

LARGEST = 1e100  # largest mean; its square is still finite
FAR = 30.0  # spreads; a category has them that half of one site's rows have, and one of 1,000 rows elsewhere
Sums = tuple[float, float, float]  # count of numbers, their mean, and the sum of their squared distances from it


class Scales(msgspec.Struct, frozen=True):
    """Mean and deviation that devices have in common, of features and of targets; None: there are none."""

    features: Scale | None = None
    targets: Scale | None = None


def scales_of(profiles: Mapping[str, Profile], fewest: int = 1) -> Scales:
    """Return mean and deviation of features and of regression targets over the devices that disclose sums of them.

    All devices must disclose them, or `fewest`: from the scale of two devices, each of the two can compute the other's sums.
    Without a common scale of features, each device has its own.

    Devices are folded in the order of their names, by `joined`. Of three or more, one that is far from most does not count in
    that column, and one with many rows counts as MOST_VOTE usual ones.
    """
    ordered = [profiles[name] for name in sorted(profiles)]
    return Scales(_scale([one.columns for one in ordered], fewest), _scale([one.targets for one in ordered], fewest))


def _scale(declared: Sequence[Columns | None], fewest: int) -> Scale | None:
    present = [columns for columns in declared if columns is not None]
    if len(present) < max(1, min(fewest, len(declared))):
        return None
    # One device may count as MOST_VOTE usual ones, as its update does in training.
    most = MOST_VOTE * median_low(columns.rows for columns in present) if len(present) >= FEWEST_VOTES else math.inf
    mean, std = [], []
    for column in range(len(present[0].mean)):
        holders = [its for its in present if not math.isnan(its.mean[column])]  # others have no such channel
        if len(holders) < max(1, min(fewest, len(declared))):
            return None
        sums = [(min(its.rows, most), its.mean[column], its.squares[column] * min(1.0, most / its.rows)) for its in holders]
        rows, middle, square = reduce(_both, _near(sums, fewest))
        mean.append(middle)
        std.append(math.sqrt(square / rows) or 1.0)
    return Scale(mean, std)


def _near(sums: Sequence[Sums], fewest: int) -> Sequence[Sums]:
    """Return the sums of one column without those of devices far from most, so that some alone do not decide the scale.

    The spread is the larger one of two medians: of the devices' deviations, and of their means' distances from the median mean.
    """
    middle = median(mean for _, mean, _ in sums)
    spread = max(
        median(math.sqrt(square / rows) for rows, _, square in sums), median(abs(mean - middle) for _, mean, _ in sums)
    )
    far = FAR * spread
    near = [its for its in sums if abs(its[1] - middle) <= far and its[2] <= its[0] * far**2]
    return near if spread and len(near) >= min(fewest, len(sums)) and 2 * len(near) > len(sums) else sums


def _both(a: Sums, b: Sums) -> Sums:
    return a[0] + b[0], *joined(a, b)


def joined(a: Sums, b: Sums) -> tuple[float, float]:
    """Return mean and sum of squared distances of two sets of numbers together, each given as count, mean and that sum.

    The pairwise update of Chan, Golub and LeVeque (The American Statistician 1983) subtracts no large squares.
    """
    (count, mean, square), (more, other, its_square) = a, b
    gap, rows = other - mean, count + more
    return mean + gap * more / rows, square + its_square + gap * gap * (count * more / rows)


def check_declared_sums(profile: Profile, name: str) -> None:
    """Check the sums of columns and of targets that a device declares.

    Raises:
        SettingError: No shard of this profile can have them.
    """
    steps = profile.shape[0] if profile.kind == "series" else 1
    features = profile.shape[-1] if profile.kind in ("series", "tabular") else 0
    targets = len(profile.labels) if profile.task == "regression" else 0
    for what, columns, rows, width in (
        ("columns", profile.columns, profile.samples * steps, features),
        ("targets", profile.targets, profile.samples, targets),
    ):
        if columns is None:
            continue
        sizes = {len(columns.mean), len(columns.squares)}
        sums = zip(columns.mean, columns.squares, strict=False)
        if not width or sizes != {width} or columns.rows != rows or not all(can_be_joined(*pair) for pair in sums):
            raise SettingError(
                f"{name} declares sums of {what} that its shard cannot have: {columns.rows} rows of {sorted(sizes)} {what}"
            )


def check_ability(profile: Profile, name: str, able: bool, common: Scales) -> None:
    """Check that a device can standardise as the plan says.

    Args:
        profile: Declaration of the device's data.
        name: The device.
        able: Whether it can standardise by its own statistics (common.protocol.LOCAL_SCALE).
        common: The plan's scales.

    Raises:
        SettingError: The device relies on a common scale, and there is none.
    """
    if not able and ((profile.columns and common.features is None) or (profile.targets and common.targets is None)):
        raise SettingError(
            f"{name} cannot standardise by its own statistics, and this federation has no common ones: update fedclient"
        )


def can_be_joined(mean: float, square: float) -> bool:
    """Return whether a mean and a sum of squared distances are possible, and small enough for `joined`."""
    return abs(mean) <= LARGEST and 0 <= square <= LARGEST**2


def check_bounds(privacy: PrivacySettings, schema: Schema | None) -> None:
    """Check that the operator's schema has what noise on the devices needs of it.

    Raises:
        SettingError: Columns have no range, or there are two kinds of ranges.
    """
    if schema is None or not privacy.on_devices:
        return
    if lacking := schema.without_bounds:
        raise SettingError(
            f"privacy.unit = {privacy.unit!r} needs public ranges, and the schema has none for the columns {listed(lacking)}: "
            "set `range` in their sections [data.columns.NAME]"
        )
    if privacy.ranges:
        raise SettingError("privacy.ranges and a schema cannot be combined: set `range` in the sections [data.columns.NAME]")


def declared_scales(privacy: PrivacySettings, profile: Profile) -> Scales:
    """Return the scaling of features and of numbers to predict by their public ranges: each becomes -1 to 1.

    Features have none without ranges, and numbers to predict then stay as they are.

    Raises:
        SettingError: There is another number of ranges than of features or of numbers.
    """
    features = privacy.ranges if profile.kind in ("series", "tabular") else []
    targets = (privacy.target_ranges or [(-1.0, 1.0)]) if profile.task == "regression" else []
    return Scales(
        _by_ranges(features, profile.shape[-1], "privacy.ranges"),
        _by_ranges(targets, len(profile.labels), "privacy.target_ranges"),
    )


def _by_ranges(ranges: Sequence[tuple[float, float]], columns: int, setting: str) -> Scale | None:
    if not ranges:
        return None
    pairs = pairs_of(ranges, columns, setting)
    return Scale([(low + high) / 2 for low, high in pairs], [(high - low) / 2 for low, high in pairs])


def pairs_of(ranges: Sequence[tuple[float, float]], columns: int, setting: str) -> Sequence[tuple[float, float]]:
    """Return a range for each column, of which one may stand for all.

    Raises:
        SettingError: There is another number of ranges than of columns.
    """
    if len(ranges) not in (1, columns):
        raise SettingError(
            f"{setting} has {len(ranges)} ranges, and the data have {columns} columns: give one for each, or one"
        )
    return [*ranges] * (columns if len(ranges) == 1 else 1)
