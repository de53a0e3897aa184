"""Guarantee of privacy that a finished model carries in model.json."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from attune.common.methods.registry import configured_on_device
from attune.common.plan import Plan
from attune.common.privacy.accountant import MEANING
from attune.common.privacy.statement import mode_of, visible_of
from attune.fedclient.messages import OrderResult


class PrivacyGuarantee(msgspec.Struct, frozen=True):
    """Privacy of a finished model's run: its guarantee by noise, and what could be seen (docs/privacy.md).

    Attributes:
        unit: "example", "group" or "client"; "none" under secure aggregation alone.
        epsilon: Epsilon that was spent on the device's data in all runs; with unit "client" the budget of the run. None if it
            is not known.
        delta: Chance that the guarantee fails.
        finished: Models that were trained without noise, or on this device's data with none: nothing is guaranteed of them.
        mode: Place where the noise is added, and secure aggregation.
        adjacency: Meaning of the two data sets that nobody can tell apart.
        planned: Epsilon of the run's budget. None if it has none.
        visible: Who sees what of the devices.
    """

    unit: str
    epsilon: float | None
    delta: float
    finished: list[str]
    mode: str = ""
    adjacency: str = ""
    planned: float | None = None
    visible: str = ""


def guarantee_of(plan: Plan, result: OrderResult, models: Collection[str]) -> PrivacyGuarantee | msgspec.UnsetType:
    """Return the guarantee of a device's models; unset where the plan has none.

    Args:
        plan: The plan.
        result: Result of the device's last order.
        models: The models that the device keeps.
    """
    privacy = plan.privacy
    if privacy is None or not mode_of(privacy):
        return msgspec.UNSET
    by_server = privacy.on_server  # what a device trains on after it is served has none of that noise
    has_noise = (
        {"common"} if by_server else {"common", "personalized"} - ({result.own_choice} if not _own_has_noise(plan) else set())
    )
    without_noise = sorted(set(models) - has_noise)
    return PrivacyGuarantee(
        privacy.unit,
        privacy.epsilon if by_server else result.epsilon,
        privacy.delta,
        sorted(models) if privacy.unit == "none" else without_noise,
        mode_of(privacy),
        "" if privacy.unit == "none" else MEANING["zero-out"].format(unit="device" if by_server else privacy.unit),
        privacy.epsilon,
        visible_of(privacy),
    )


def _own_has_noise(plan: Plan) -> bool:
    """Return whether what the method leads to on a device follows from its samples through noise alone."""
    configured = configured_on_device(plan)
    stays = configured.objective.own_stays and configured.predictor.own_model
    return not (stays or configured.predictor.reads_samples or configured.dial)
