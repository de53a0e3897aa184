"""Privacy of a run: its mode, what is promised, what of it is spent, and who sees what."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from attune.common.config import PrivacySettings
from attune.common.errors import SettingError
from attune.common.methods.private_training import steps_per_order, with_orders
from attune.common.methods.registry import configured_on_device
from attune.common.plan import Plan
from attune.common.privacy.accountant import MEANING, NoisySteps, epsilon_of
from attune.common.privacy.statement import mode_of, visible_of
from attune.fedserver.core.client_privacy import drawn_rate, releases
from attune.fedserver.core.records import Report
from attune.fedserver.ports.ledger import Snapshot

ROUNDING = 1e-6  # of a reported epsilon


def privacy_facts(snapshot: Snapshot) -> dict[str, Any] | None:
    """Return what status, dashboard and exports say of privacy; None without any."""
    privacy = asked(snapshot)
    if not mode_of(privacy):
        return None
    facts = guarantee(snapshot)
    if facts is None:
        spent, fallen = spent_epsilons(snapshot.rows)
        facts = {
            "unit": privacy.unit,
            "epsilon": privacy.epsilon if privacy.on_devices else None,
            "delta": privacy.delta,
            "spent": max(spent.values(), default=None),
            "fallen": fallen,
        }
        if privacy.on_devices:
            facts["adjacency"] = MEANING["zero-out"].format(unit=privacy.unit)
    return facts | {"mode": mode_of(privacy), "visible": visible_of(privacy), "clipping": clipping(snapshot)}


def clipping(snapshot: Snapshot) -> dict[str, Any] | None:
    """Return how many devices clipped their update in the latest masked sum; None without one."""
    summed, privacy = snapshot.record.summed, asked(snapshot)
    if summed is None or not privacy.secure_aggregation:
        return None
    words = summed.told(privacy.secure_clip)
    return {"round": summed.round, "devices": summed.devices, "clipped": summed.clipped, "above": summed.above, "told": words}


def spent_epsilons(rows: Iterable[Report]) -> tuple[dict[str, float], list[str]]:
    """Return the most that each device has reported as spent on its data, and those devices that reported less later.

    What was spent never falls. It seems to where a device's ledger was replaced by an older copy, which forgets charges.
    """
    most: dict[str, float] = {}
    fallen = set()
    for row in rows:
        if row.epsilon is not None:
            if row.epsilon < most.get(row.client, 0.0) * (1 - ROUNDING):
                fallen.add(row.client)
            most[row.client] = max(row.epsilon, most.get(row.client, 0.0))
    return most, sorted(fallen)


def fallen_line(names: Iterable[str]) -> str:
    """Return the warning about devices whose ledgers have forgotten charges."""
    return (
        f"warning: {', '.join(names)} reported less spent than before: their data are new, or an older copy of the privacy "
        "ledger was restored, and more was spent than is shown. Have the newest copy restored, or revoke the device"
    )


def asked(snapshot: Snapshot) -> PrivacySettings:
    """Return what the plan asks for; before there is one, what the settings ask for."""
    return (snapshot.plan.privacy if snapshot.plan else None) or snapshot.settings.privacy


def guarantee(snapshot: Snapshot) -> dict[str, Any] | None:
    """Return what status and exports say of noisy sums; None without client-level privacy. Unknown numbers are None."""
    settings, privacy = snapshot.settings, asked(snapshot)
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
    }


def _spent(privacy: PrivacySettings, snapshot: Snapshot) -> float | None:
    try:
        epsilon = epsilon_of(releases(privacy, snapshot.settings.round, snapshot.record.releases), privacy.delta)
    except SettingError:  # dp-accounting is not installed here
        return None
    return epsilon if math.isfinite(epsilon) else None


def planned_epsilons(snapshot: Snapshot) -> dict[str, float | None]:
    """Return what all orders of the run will have cost each device's data; None if it is not known.

    It is the budget, if there is one: a device sets its noise by that. Else it follows from the noise and the samples that the
    device trains on, which may be fewer than it has declared.
    """
    privacy, plan = with_orders(asked(snapshot), snapshot.settings.round.rounds), snapshot.plan
    if not privacy.on_devices or plan is None:
        return {}
    names = [device.name for device in snapshot.devices]
    if privacy.noise is None:
        return dict.fromkeys(names, privacy.epsilon)
    trained_on = {row.client: row.samples for row in snapshot.rows if row.work == "train" and row.samples}
    cost = {samples: _cost_of_all(plan, privacy, samples) for samples in set(trained_on.values())}
    return {name: cost.get(trained_on.get(name, 0)) for name in names}


def _cost_of_all(plan: Plan, privacy: PrivacySettings, samples: int) -> float | None:
    steps = steps_per_order(configured_on_device(plan), plan.train, samples) * privacy.orders
    try:
        cost = epsilon_of([NoisySteps(min(1.0, plan.train.batch_size / samples), privacy.noise or 0.0, steps)], privacy.delta)
    except SettingError:  # dp-accounting is not installed here
        return None
    return (cost if privacy.epsilon is None else min(cost, privacy.epsilon)) if math.isfinite(cost) else None


def privacy_lines(facts: dict[str, Any]) -> list[str]:
    """Return what `privacy_facts` returns as lines for people."""
    last = [f"  {facts['mode']}: {facts['visible']}", *([f"  {sizes['told']}"] if (sizes := facts.get("clipping")) else [])]
    if "releases" in facts:
        return [*guarantee_lines(facts), *last]
    if facts["unit"] == "none":
        return [f"privacy: {facts['mode']}; {facts['visible']}", *last[1:]]
    budget = "no budget" if facts["epsilon"] is None else f"a budget of {facts['epsilon']:g}"
    spent = "nothing spent yet" if facts["spent"] is None else f"at most {facts['spent']:.3g} spent by a device"
    line = f"privacy: by {facts['unit']}, epsilon with {budget} at delta {facts['delta']:g}; {spent}"
    return [line, *last, *([fallen_line(facts["fallen"])] if facts.get("fallen") else [])]


def guarantee_lines(facts: dict[str, Any]) -> list[str]:
    """Return the guarantee as lines for people."""
    budget = "no budget" if facts["epsilon"] is None else f"a budget of {facts['epsilon']:g}"
    spent = "an unknown epsilon" if facts["spent"] is None else f"epsilon = {facts['spent']:.3g}"
    line = f"privacy: by device, {spent} spent on {facts['releases']} released sums, with {budget} at delta {facts['delta']:g}"
    return [line, "its noise comes from a seed, so it protects nobody"] if facts["insecure"] else [line]
