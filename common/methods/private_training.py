"""Conflicts of features, and the rows about noise on the devices, which the server checks at its start, and each device again.

All other rows are in `fedserver.core.conflicts`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec

from attune.common.config import PrivacySettings, TrainSettings
from attune.common.errors import SettingError
from attune.common.methods.method import ConfiguredMethod


class Conflict(NamedTuple):
    """Two features that cannot be combined, or a setting that a feature needs.

    Attributes:
        sentence: Text that names both; `{s}` in it stands for the settings, and `{why}` for the answer of `holds`.
        holds: Returns whether the settings have both, or why they have.
    """

    sentence: str
    holds: Callable[[Any], object]


def check_rows(conflicts: Iterable[Conflict], settings: Any) -> None:
    """Check that the settings have none of these conflicts.

    Raises:
        SettingError: They have one; the error is its sentence.
    """
    for conflict in conflicts:
        if why := conflict.holds(settings):
            raise SettingError(conflict.sentence.format(s=settings, why=why))


CONFLICTS = [
    Conflict(
        'privacy.statistics_epsilon is for noise on the devices (privacy.unit = "example" or "group") without '
        "privacy.secure_aggregation",
        lambda s: s.privacy.statistics_epsilon is not None and (not s.privacy.on_devices or s.privacy.secure_aggregation),
    ),
    Conflict(
        "privacy.statistics_epsilon = {s.privacy.statistics_epsilon:g} leaves nothing of privacy.epsilon = "
        "{s.privacy.epsilon:g} for training",
        lambda s: (
            None not in (s.privacy.statistics_epsilon, s.privacy.epsilon) and s.privacy.statistics_epsilon >= s.privacy.epsilon
        ),
    ),
    Conflict(
        'privacy.unit = "{s.privacy.unit}" needs privacy.epsilon or privacy.noise',
        lambda s: s.privacy.unit != "none" and s.privacy.epsilon is None and s.privacy.noise is None,
    ),
    Conflict(
        'method {s.configured.method.name} cannot train with privacy.unit = "{s.privacy.unit}": {why}. Take another method',
        lambda s: s.privacy.on_devices and s.configured.objective.not_private,
    ),
    Conflict(
        'train.mixed_precision = "{s.train.mixed_precision}" is too coarse for privacy.unit = "{s.privacy.unit}": leave it off',
        lambda s: s.privacy.on_devices and s.train.mixed_precision != "off",
    ),
]


def check_private(configured: ConfiguredMethod, train: TrainSettings, privacy: PrivacySettings) -> None:
    """Refuse settings with which a device cannot train with noise.

    Raises:
        SettingError: It names the setting.
    """
    check_rows(CONFLICTS, SimpleNamespace(configured=configured, train=train, privacy=privacy))


def steps_per_order(configured: ConfiguredMethod, train: TrainSettings, samples: int) -> int:
    """Return how many steps with noise a device with so many samples takes in a training order."""
    return configured.objective.private_steps(train, math.ceil(samples / train.batch_size))


def with_orders(privacy: PrivacySettings, rounds: int) -> PrivacySettings:
    """Return the settings with the most training orders of a device, for which its noise is set."""
    if not privacy.on_devices or privacy.orders:
        return privacy
    return msgspec.structs.replace(privacy, orders=rounds)
