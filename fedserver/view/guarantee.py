"""Guarantee of client-level privacy of a run, and what of it is spent."""

from __future__ import annotations

import math
from typing import Any

from attune.common.config import PrivacySettings
from attune.common.errors import SettingError
from attune.common.privacy.accountant import MEANING, epsilon_of
from attune.fedserver.core.client_settings import drawn_rate, releases
from attune.fedserver.ports.ledger import Snapshot

VISIBLE = (
    "the server sees each device's update, and is trusted; other devices and the exported common model see noisy sums alone"
)


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


def guarantee_lines(facts: dict[str, Any]) -> list[str]:
    """Return the guarantee as lines for people."""
    budget = "no budget" if facts["epsilon"] is None else f"a budget of {facts['epsilon']:g}"
    spent = "an unknown epsilon" if facts["spent"] is None else f"epsilon = {facts['spent']:.3g}"
    line = f"privacy: by device, {spent} spent on {facts['releases']} released sums, with {budget} at delta {facts['delta']:g}"
    return [line, "its noise comes from a seed, so it protects nobody"] if facts["insecure"] else [line]
