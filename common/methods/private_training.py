"""Limits of what devices can train with noise: checked by the server before round 1, and by each device again."""

from __future__ import annotations

import math

import msgspec

from attune.common.config import PrivacySettings, TrainSettings
from attune.common.errors import SettingError
from attune.common.methods.method import ConfiguredMethod


def check_private(configured: ConfiguredMethod, train: TrainSettings, privacy: PrivacySettings) -> None:
    """Refuse settings with which devices cannot train with noise.

    Raises:
        SettingError: It names the setting.
    """
    statistics = privacy.statistics_epsilon
    if statistics is not None and (not privacy.on_devices or privacy.secure_aggregation):
        raise SettingError(
            'privacy.statistics_epsilon is for noise on the devices (privacy.unit = "example" or "group") without '
            "privacy.secure_aggregation"
        )
    if statistics is not None and privacy.epsilon is not None and statistics >= privacy.epsilon:
        raise SettingError(
            f"privacy.statistics_epsilon = {statistics:g} leaves nothing of privacy.epsilon = {privacy.epsilon:g} for training"
        )
    if not privacy.on_devices:
        return
    if privacy.epsilon is None and privacy.noise is None:
        raise SettingError(f'privacy.unit = "{privacy.unit}" needs privacy.epsilon or privacy.noise')
    if why := configured.objective.not_private:
        name = configured.method.name
        raise SettingError(f'method {name} cannot train with privacy.unit = "{privacy.unit}": {why}. Take another method')
    if train.finish_stop == "fleet":
        raise SettingError(
            f'train.finish_stop cannot be used with privacy.unit = "{privacy.unit}": likelihoods without noise would choose '
            "how long all devices finish. Leave it out"
        )
    if train.mixed_precision != "off":
        raise SettingError(f"train.mixed_precision = {train.mixed_precision!r} is too coarse for privacy.unit: leave it off")


def steps_per_order(configured: ConfiguredMethod, train: TrainSettings, samples: int) -> int:
    """Return how many steps with noise a device with so many samples takes in a training order."""
    return configured.objective.private_steps(train, math.ceil(samples / train.batch_size))


def with_orders(privacy: PrivacySettings, rounds: int) -> PrivacySettings:
    """Return the settings with the most training orders of a device, for which its noise is set."""
    if not privacy.on_devices or privacy.orders:
        return privacy
    return msgspec.structs.replace(privacy, orders=rounds)
