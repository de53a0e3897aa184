"""Layouts of masked and of noised statistics: devices are asked for what they declare, whatever the sums are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from attune.common.config import PrivacySettings
from attune.common.errors import SettingError
from attune.common.plan import DataSettings, Profile
from attune.common.schema import Schema
from attune.common.site_statistics import MOST_COLUMNS, Centre, MaskedLayout, NoisyColumn, NoisyLayout, output_columns
from attune.common.text import clean
from attune.fedserver.core.scale import pairs_of

NO_RANGE = Centre(0.0, 1.0)  # of a column without a public range
WITHOUT_RANGE = "it has no public range (`range` in the schema, privacy.ranges or privacy.target_ranges)"
BETWEEN = "noise of each site would look like a difference"
UNDECLARED = "declare them (data.classes): which ones occur tells of the data"
NO_SURVIVAL = "times and events have no noisy sums, since survival cannot be trained with noise on the devices"
NOTHING = "there is nothing to ask for with noise: give columns a `range` in the operator's schema, or declare data.classes"


@dataclass(frozen=True)
class Asks:
    """Facts of a federation on which its layouts depend: its fingerprint, and the sections [privacy] and [data]."""

    federation: str
    privacy: PrivacySettings
    data: DataSettings


def columns_of(profile: Profile) -> list[str]:
    """Return the names of the columns of which a device with this profile can give statistics."""
    width = profile.shape[-1] if profile.kind in ("tabular", "series") else 0
    features = list(profile.column_names)[:width] or [f"column {number + 1}" for number in range(width)]
    return features + output_columns(profile.task, profile.labels)


def survival_columns(profiles: Iterable[Profile]) -> list[str]:
    """Return the column of times and that of events, if all devices with survival have the same ones; else none."""
    pairs = {tuple(output_columns(profile.task, profile.labels)) for profile in profiles if profile.task == "survival"}
    return list(pairs.pop()) if len(pairs) == 1 else []


def scaled_of(profile: Profile) -> tuple[list[str], list[str]]:
    """Return the names of the features and of the numbers to predict that may have a common scale."""
    targets = list(map(str, profile.labels)) if profile.task == "regression" else []
    columns = columns_of(profile)
    return columns[: len(columns) - len(output_columns(profile.task, profile.labels))], targets


def masked_layout(
    asks: Asks, profiles: Mapping[str, Profile], wanted: Sequence[str], for_scales: bool = False
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
    forms, _ = _public_forms(asks, sites)
    layout = MaskedLayout(
        asks.federation,
        {name: forms[name].centre if name in forms else NO_RANGE for name in names},
        *(list(names.pop()) if len(names) == 1 else [] for names in (classes, features, targets)),
    )
    return layout, without


def noisy_layout(asks: Asks, profiles: Mapping[str, Profile], wanted: Sequence[str]) -> tuple[NoisyLayout, dict[str, str]]:
    """Return what these devices are asked for with noise, and what is withheld, with the reasons.

    It depends on declarations alone, so that the same question at another time is the same, and costs nothing again.

    Args:
        asks: The federation's settings.
        profiles: What the devices declare.
        wanted: Names of columns; empty: all.

    Raises:
        SettingError: A column is not known, or cannot be released; or nothing can.
    """
    columns, withheld = _public_forms(asks, list(profiles.values()))
    for name in wanted:
        if name not in columns:
            raise SettingError(f"the column {clean(name)!r} has no noisy statistics: {withheld.get(name, 'no schema has it')}")
    classes: list[str] = []
    if all(profile.task == "classes" and not profile.per_position for profile in profiles.values()):
        classes = [str(label) for label in asks.data.classes]
        withheld |= {} if classes else {"classes": UNDECLARED}
    columns = {name: columns[name] for name in sorted(wanted or columns)}
    if not columns and not classes:
        raise SettingError(f"{NOTHING} ({'; '.join(f'{name}: {why}' for name, why in withheld.items())})")
    unit: Literal["example", "group"] = "group" if asks.privacy.unit == "group" else "example"
    epsilon = asks.privacy.statistics_epsilon or 0.0
    layout = NoisyLayout(asks.federation, unit, epsilon, asks.privacy.delta, asks.privacy.epsilon, columns, classes)
    return layout, withheld | {"differences between sites": BETWEEN}


def _public_forms(asks: Asks, profiles: Sequence[Profile]) -> tuple[dict[str, NoisyColumn], dict[str, str]]:
    """Return the columns that have public ranges or values, and why others are withheld."""
    columns: dict[str, NoisyColumn] = {}
    schemas = {profile.schema.digest: profile.schema for profile in profiles if isinstance(profile.schema, Schema)}
    schema = asks.data.schema or (next(iter(schemas.values())) if len(schemas) == 1 else None)
    names = [] if schema is not None else asks.data.names or _same([columns_of(profile) for profile in profiles])
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
        columns = _ranged(names, asks.privacy.ranges, "privacy.ranges")
    columns |= _ranged(targets, asks.privacy.target_ranges, "privacy.target_ranges")
    withheld = {name: WITHOUT_RANGE for name in [*names, *targets] if name not in columns}
    return columns, withheld | ({"survival": NO_SURVIVAL} if survival else {})


def _same(lists: Sequence[list[str]]) -> list[str]:
    """Return the names that all devices declare alike; none if they differ."""
    return lists[0] if lists and all(names == lists[0] for names in lists) else []


def _ranged(names: Sequence[str], ranges: Sequence[tuple[float, float]], setting: str) -> dict[str, NoisyColumn]:
    pairs = pairs_of(ranges, len(names), setting) if ranges and names else []
    return {name: NoisyColumn(bounds) for name, bounds in zip(names, pairs, strict=False)}
