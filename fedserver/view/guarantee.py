"""Guarantee of differential privacy of a run, and what of it is spent."""

from __future__ import annotations

import math
from typing import Any

from attune.common.config import PrivacySettings
from attune.common.errors import SettingError
from attune.common.privacy.accountant import MEANING, epsilon_of
from attune.fedserver.core.accuracy import latest_metrics
from attune.fedserver.core.client_settings import drawn_rate, releases
from attune.fedserver.ports.ledger import Snapshot

VISIBLE = {
    "client": "the server sees each device's update, and is trusted; devices and exported common models see noisy sums alone",
    "example": "the server and the other devices see what was trained with noise",
}


def guarantee(snapshot: Snapshot) -> dict[str, Any] | None:
    """Return what status and exports say of privacy; None without differential privacy. Numbers that are unknown are None."""
    settings = snapshot.settings
    privacy = settings.privacy if snapshot.plan is None else snapshot.plan.privacy or PrivacySettings()
    if privacy.unit == "none":
        return None
    unit = {"client": "device", "example": "sample"}.get(privacy.unit, privacy.unit)
    facts: dict[str, Any] = {
        "unit": privacy.unit,
        "epsilon": privacy.epsilon,
        "delta": privacy.delta,
        "clip": privacy.clip,
        "noise": privacy.noise,
        "adjacency": MEANING["zero-out"].format(unit=unit),
        "insecure": privacy.insecure_seed is not None,
    }
    if not privacy.on_server:
        spent = [metrics.get("epsilon") for metrics in latest_metrics(snapshot.rows).values()]
        most = max((epsilon for epsilon in spent if epsilon is not None), default=None)
        return facts | {"spent": most, "visible": VISIBLE["example"]}
    count = snapshot.record.releases
    return facts | {
        "spent": _spent(privacy, snapshot, count),
        "releases": count,
        "rate": drawn_rate(privacy, settings.round),
        "visible": VISIBLE["client"],
    }


def _spent(privacy: PrivacySettings, snapshot: Snapshot, count: int) -> float | None:
    try:
        epsilon = epsilon_of(releases(privacy, snapshot.settings.round, count), privacy.delta)
    except SettingError:  # dp-accounting is not installed here
        return None
    return epsilon if math.isfinite(epsilon) else None


def guarantee_lines(facts: dict[str, Any]) -> list[str]:
    """Return the guarantee as lines for people."""
    planned = "no limit" if facts["epsilon"] is None else f"{facts['epsilon']:g} planned"
    released = f" for {facts['releases']} released sums" if "releases" in facts else ", the most of a device"
    spent = "not known" if facts["spent"] is None else f"{facts['spent']:.3g}"
    lines = [f"privacy of each {facts['unit']}: epsilon {spent} spent{released}, {planned}, at delta = {facts['delta']:g}"]
    return [*lines, "its noise comes from a seed, so it protects nobody"] if facts["insecure"] else lines
