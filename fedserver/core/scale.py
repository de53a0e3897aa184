"""Federation-wide means and standard deviations of columns, from the sums of each device. No sample leaves a device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import reduce

from attune.common.errors import SettingError
from attune.common.plan import Columns, Profile, Scale

LARGEST = 1e100  # largest mean; its square is still finite


def scale_of(profiles: Mapping[str, Profile]) -> Scale | None:
    """Return mean and deviation of the feature columns over the devices that declare sums; None if no device does.

    Uses the pairwise update of Chan, Golub and LeVeque (The American Statistician 1983), which subtracts no large squares.
    Devices are folded in the order of their names.
    """
    return _scale([profiles[name].columns for name in sorted(profiles)])


def scale_of_targets(profiles: Mapping[str, Profile]) -> Scale | None:
    """Return mean and deviation of the regression targets, so that all models use one unit; None in other tasks."""
    return _scale([profiles[name].targets for name in sorted(profiles)])


def _scale(declared: Iterable[Columns | None]) -> Scale | None:
    present = [columns for columns in declared if columns is not None]
    if not present:
        return None
    folded = reduce(_both, present)
    std = [math.sqrt(square / folded.rows) for square in folded.squares]
    return Scale(folded.mean, [deviation or 1.0 for deviation in std])


def _both(a: Columns, b: Columns) -> Columns:
    rows = a.rows + b.rows
    gaps = [y - x for x, y in zip(a.mean, b.mean, strict=True)]
    mean = [x + gap * b.rows / rows for x, gap in zip(a.mean, gaps, strict=True)]
    between = a.rows * b.rows / rows
    squares = [x + y + gap * gap * between for x, y, gap in zip(a.squares, b.squares, gaps, strict=True)]
    return Columns(rows, mean, squares)


def check_columns(profile: Profile, name: str) -> None:
    """Check the sums of columns that a device declares.

    Raises:
        SettingError: No shard of this profile can have them.
    """
    columns = profile.columns
    if columns is None:
        return
    most = profile.samples * (profile.shape[0] if profile.kind == "series" else 1)
    sizes = {len(columns.mean), len(columns.squares)}
    if (
        profile.kind not in ("series", "tabular")
        or sizes != {profile.shape[-1]}
        or columns.rows != most
        or not _within(columns)
    ):
        raise SettingError(
            f"{name} declares sums of columns that its shard cannot have: {columns.rows} rows of {sorted(sizes)} columns"
        )


def check_targets(profile: Profile, name: str) -> None:
    """Check the sums of targets that a device declares.

    Raises:
        SettingError: No shard of this profile can have them, or they are missing.
    """
    targets = profile.targets
    if (targets is not None) != (profile.task == "regression"):
        raise SettingError(f"{name} declares the task {profile.task} {'with' if targets else 'without'} sums of its targets")
    if targets is None:
        return
    sizes = {len(targets.mean), len(targets.squares)}
    if sizes != {len(profile.labels)} or targets.rows != profile.samples or not _within(targets):
        raise SettingError(
            f"{name} declares sums of targets that its shard cannot have: {targets.rows} rows of {sorted(sizes)} targets"
        )


def _within(columns: Columns) -> bool:
    """Return whether all numbers are small enough to be folded."""
    return all(abs(x) <= LARGEST for x in columns.mean) and all(0 <= x <= LARGEST**2 for x in columns.squares)
