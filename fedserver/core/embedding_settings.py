"""Embeddings on the devices, or from descriptions, in the settings of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attune.common.methods.method import ConfiguredMethod
from attune.common.methods.settings.aggregators import HypernetworkSettings


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
