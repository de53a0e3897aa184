"""Transforms by name, with their typed settings: those of this package, and those of plug-ins (attune.common.plugins)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, cast

import msgspec

from attune.common.config import CountOrZero, NonNegative, Positive, convert
from attune.common.exchange.transform import Transform, TransformSettings
from attune.common.plugins import Package, PluginRegistry, implementation_of
from attune.common.protocol import SPARE

SECURE_SUM = "secure-sum-4"  # a new name for each form: a device that does not know it is refused by name


class SecureSumSettings(TransformSettings, frozen=True, forbid_unknown_fields=True):
    """Secure aggregation of a part, as the plan fixes it. `privacy.secure_aggregation` sets it; see attune.common.config.

    Attributes:
        clip: Largest change of a number that counts.
        devices: Fewest devices in a sum.
        spare: Devices in a sum beyond the threshold.
        same_cohort: All sums are over the devices of the first one.
        samples: Fewest training samples of a device in a sum.
        norm: Largest L2 norm of a device's change; 0: no bound.
        most_samples: The training samples that have the weight 1.
        uniform: Every device has the weight 1.
        exact: Updates are sums over samples, whose sum is exact. A device is in one such sum. It is on for `beside`.
    """

    implementation: ClassVar[str] = "attune.common.secure.secure_sum:SecureSum"
    growth: ClassVar[float] = 2.0  # of tensors of 16 bits
    excludes: ClassVar[frozenset[str]] = frozenset(
        {"bf16", "int8", "zstd", "sample-bound", "change-bound", "votes", "norm-limit"}
    )

    clip: Positive = 1.0
    devices: Annotated[int, msgspec.Meta(ge=3, le=256)] = 5
    spare: Annotated[int, msgspec.Meta(ge=SPARE, le=127)] = SPARE
    same_cohort: bool = False
    samples: CountOrZero = 0
    norm: NonNegative = 0.0
    most_samples: CountOrZero = 0
    uniform: bool = False
    exact: bool = False


TRANSFORMS: PluginRegistry[type[TransformSettings]] = PluginRegistry(
    "transforms", TransformSettings, {SECURE_SUM: SecureSumSettings}
)
SPOKEN_AS = "transform:"  # before the name of a transform, in what a device says that it can do


def settings_of(transforms: Mapping[str, Any]) -> dict[str, TransformSettings]:
    """Return the typed settings of each transform by name, in the order of the table [transforms].

    Raises:
        SettingError: For an unknown transform or setting, or a value that cannot be.
    """
    return {
        name: convert(TRANSFORMS.require(name, "transform"), values, f"transforms.{name}.")
        for name, values in transforms.items()
    }


def secure_sum_in(transforms: Mapping[str, Any]) -> SecureSumSettings | None:
    """Return the settings of secure aggregation in a plan's transforms; None without it. Errors are those of `settings_of`."""
    if SECURE_SUM not in transforms:
        return None
    return cast(SecureSumSettings, settings_of({SECURE_SUM: transforms[SECURE_SUM]})[SECURE_SUM])


def transforms_for(part: str, settings: Mapping[str, TransformSettings], beside: bool = False) -> list[Transform]:
    """Make the transforms of a part, in order. Sums over samples `beside` a method's updates have masks alone."""
    chosen = {name: options for name, options in settings.items() if options.applies_to(part)}
    if beside:
        chosen = {name: msgspec.structs.replace(of, exact=True) for name, of in chosen.items() if name == SECURE_SUM}
    return [cast(Any, implementation_of(type(options), name))(name, options) for name, options in chosen.items()]


def growth_of(part: str, settings: Mapping[str, TransformSettings]) -> float:
    """Return how many times as many bytes an update of a part may have by its transforms."""
    return math.prod(transform.growth for transform in settings.values() if transform.applies_to(part))


def packages_of(names: Iterable[str]) -> list[Package]:
    """Return the packages that offer these transforms; loads no code of them."""
    return [package for name in names if (package := TRANSFORMS.package_of(name)) is not None]
