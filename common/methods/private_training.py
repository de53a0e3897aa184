"""Rows of conflicts with noise on the devices, which the server checks at its start, and each device again."""

from __future__ import annotations

import math
from types import SimpleNamespace

import msgspec

from attune.common import conflicts
from attune.common.config import PrivacySettings, TrainSettings
from attune.common.conflicts import Conflict
from attune.common.methods.method import ConfiguredMethod

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
    conflicts.check(CONFLICTS, SimpleNamespace(configured=configured, train=train, privacy=privacy))


def steps_per_order(configured: ConfiguredMethod, train: TrainSettings, samples: int) -> int:
    """Return how many steps with noise a device with so many samples takes in a training order."""
    return configured.objective.private_steps(train, math.ceil(samples / train.batch_size))


def with_orders(privacy: PrivacySettings, rounds: int) -> PrivacySettings:
    """Return the settings with the most training orders of a device, for which its noise is set."""
    if not privacy.on_devices or privacy.orders:
        return privacy
    return msgspec.structs.replace(privacy, orders=rounds)
