"""Statement of a run's privacy in words: its mode, and what can be seen. Status, dashboard and finished models carry it."""

from __future__ import annotations

from attune.common.config import PrivacySettings

ON_SERVER = (
    "the server sees each device's update, and is trusted; other devices and the exported common model see noisy sums alone"
)
ON_DEVICES = "the server sees updates that were trained with noise; what a device keeps for itself may have none"
SUMS = "the server sees sums of at least {least} updates, and no single one"


def mode_of(privacy: PrivacySettings) -> str:
    """Return how a run protects its devices; empty if it does not."""
    modes = ["noise on the server"] * privacy.on_server + ["noise on the devices"] * privacy.on_devices
    return " and ".join(modes + ["secure aggregation"] * privacy.secure_aggregation)


def visible_of(privacy: PrivacySettings) -> str:
    """Return who sees what under `mode_of`; empty without protection."""
    words = [ON_SERVER] * privacy.on_server + [ON_DEVICES] * privacy.on_devices
    return "; ".join(words + [SUMS.format(least=privacy.secure_devices)] * privacy.secure_aggregation)
