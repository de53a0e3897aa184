"""Embeddings on the devices, or from descriptions, in the settings of a run: what these cannot be combined with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attune.common.config import PrivacySettings, RoundSettings
from attune.common.errors import SettingError
from attune.common.methods.method import ConfiguredMethod
from attune.common.methods.settings.aggregators import HypernetworkSettings

ON = 'method.embedding = "device"'
DESCRIBED = 'method.embedding = "described"'


def device_defaults(method_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults with embeddings on the devices: devices weigh steps by samples, and nothing is taken back."""
    if method_settings.get("embedding") != "device":
        return {}
    return {"method": {"bound_samples": 0.0}, "round": {"take_back": 0.0}}


def embeds_on_devices(configured: ConfiguredMethod) -> bool:
    """Return whether each device keeps its embedding."""
    return any(isinstance(part, HypernetworkSettings) and part.on_device for part in configured.aggregators.values())


def describes_devices(configured: ConfiguredMethod) -> bool:
    """Return whether a later device's embedding starts from what it says of its data."""
    return any(isinstance(part, HypernetworkSettings) and part.is_described for part in configured.aggregators.values())


def check_embedding(configured: ConfiguredMethod, rounds: RoundSettings, privacy: PrivacySettings) -> None:
    """Check what embeddings on the devices, or from descriptions, cannot be combined with.

    Raises:
        SettingError: It names the setting.
    """
    if describes_devices(configured) and (privacy.on_devices or privacy.on_server):
        raise SettingError(f"{DESCRIBED} cannot be combined with privacy.unit: a description of a device's data has no noise")
    for part in configured.aggregators.values():
        if not isinstance(part, HypernetworkSettings) or not part.on_device:
            continue
        wrong = {
            "method.robust: what devices hand in is a gradient, whose numbers are not to be voted on or clipped": part.clips,
            "method.bound_samples: a device weighs the step of its embedding by its own samples": part.bound_samples > 0,
            "round.take_back: the server cannot take embeddings back that it does not have": rounds.take_back > 0,
            'round.train = "all": each round must start from what the server serves': rounds.train == "all",
            "round.adapt_rounds: a newcomer's embedding is not on the server": rounds.adapt_rounds > 0,
        }
        for why, is_wrong in wrong.items():
            if is_wrong:
                raise SettingError(f"{ON} cannot be combined with {why}")
