"""Privacy of a run: its mode, what is promised, what of it is spent, and who sees what."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from attune.common.config import PrivacySettings
from attune.common.errors import SettingError
from attune.common.privacy.accountant import MEANING, epsilon_of
from attune.fedserver.core.client_settings import drawn_rate, releases
from attune.fedserver.ports.ledger import Snapshot

VISIBLE = (
    "the server sees each device's update, and is trusted; other devices and the exported common model see noisy sums alone"
)
NOISY = "the server sees updates that were trained with noise; what a device keeps for itself may have none"
SUMS = "the server sees sums of at least {least} updates, and no single one"


def privacy_facts(snapshot: Snapshot, reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return what status, dashboard and exports say of privacy; None without any.

    Args:
        snapshot: The ledger's contents.
        reports: The latest metrics of each device.
    """
    privacy = (snapshot.plan.privacy if snapshot.plan else None) or snapshot.settings.privacy
    modes = ["noise on the server"] * privacy.on_server + ["noise on the devices"] * privacy.on_devices
    modes += ["secure aggregation"] * privacy.secure_aggregation
    if not modes:
        return None
    sums = [SUMS.format(least=privacy.secure_devices)] if privacy.secure_aggregation else []
    facts = guarantee(snapshot)
    if facts is None:
        spent = [metrics["epsilon"] for metrics in reports.values() if metrics.get("epsilon") is not None]
        facts = {
            "unit": privacy.unit,
            "epsilon": privacy.epsilon if privacy.on_devices else None,
            "delta": privacy.delta,
            "spent": max(spent, default=None),
            "visible": "; ".join([*([NOISY] if privacy.on_devices else []), *sums]),
        }
        if privacy.on_devices:
            facts["adjacency"] = MEANING["zero-out"].format(unit=privacy.unit)
    return facts | {"mode": " and ".join(modes)}


def guarantee(snapshot: Snapshot) -> dict[str, Any] | None:
    """Return what status and exports say of noisy sums; None without client-level privacy. Unknown numbers are None."""
    settings = snapshot.settings
    privacy = (snapshot.plan.privacy if snapshot.plan else None) or settings.privacy
    if not privacy.on_server:
        return None
    return {
        "unit": privacy.unit,
        "epsilon": privacy.epsilon,
        "delta": privacy.delta,
        "spent": _spent(privacy, snapshot),
        "releases": snapshot.record.releases,
        "rate": drawn_rate(privacy, settings.round),
        "clip": privacy.clip,
        "noise": privacy.noise,
        "adjacency": MEANING["zero-out"].format(unit="device"),
        "insecure": privacy.insecure_seed is not None,
        "visible": VISIBLE,
    }


def _spent(privacy: PrivacySettings, snapshot: Snapshot) -> float | None:
    try:
        epsilon = epsilon_of(releases(privacy, snapshot.settings.round, snapshot.record.releases), privacy.delta)
    except SettingError:  # dp-accounting is not installed here
        return None
    return epsilon if math.isfinite(epsilon) else None


def privacy_lines(facts: dict[str, Any]) -> list[str]:
    """Return what `privacy_facts` returns as lines for people."""
    if "releases" in facts:
        return guarantee_lines(facts)
    if facts["unit"] == "none":
        return [f"privacy: {facts['mode']}; {facts['visible']}"]
    budget = "no budget" if facts["epsilon"] is None else f"a budget of {facts['epsilon']:g}"
    spent = "nothing spent yet" if facts["spent"] is None else f"at most {facts['spent']:.3g} spent by a device"
    return [f"privacy: by {facts['unit']}, epsilon with {budget} at delta {facts['delta']:g}; {spent}"]


def guarantee_lines(facts: dict[str, Any]) -> list[str]:
    """Return the guarantee as lines for people."""
    budget = "no budget" if facts["epsilon"] is None else f"a budget of {facts['epsilon']:g}"
    spent = "an unknown epsilon" if facts["spent"] is None else f"epsilon = {facts['spent']:.3g}"
    line = f"privacy: by device, {spent} spent on {facts['releases']} released sums, with {budget} at delta {facts['delta']:g}"
    return [line, "its noise comes from a seed, so it protects nobody"] if facts["insecure"] else [line]
