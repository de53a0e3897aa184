"""Secure aggregation in the settings of a run: what it turns off, and what the plan says of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from attune.common.config import PrivacySettings, merge
from attune.common.errors import SettingError
from attune.common.exchange.registry import SECURE_SUM
from attune.common.methods.method import ConfiguredMethod, Method
from attune.common.methods.settings.aggregators import AggregatorSettings, HypernetworkSettings, MeanSettings
from attune.common.plan import Plan, Profile
from attune.common.protocol import SPARE

ON = "privacy.secure_aggregation"
TENTH = 0.1 * (1 - 1e-9)  # of a usual step, with the error of rounding


def defaults_of(privacy: PrivacySettings, method: Method) -> dict[str, Any]:
    """Return the defaults under secure aggregation: nothing that looks at single updates, and rounds that are large enough.

    Raises:
        SettingError: The method shares nothing.
    """
    if not privacy.secure_aggregation:
        return {}
    if set(method.kinds) <= {"private"}:
        raise SettingError(f"method {method.name} shares nothing that {ON} could sum")
    return {
        "method": {"bound_change": 0.0, "bound_samples": 0.0},
        "round": {"take_back": 0.0, "min_clients": privacy.secure_devices},
    }


def knows_more(privacy: PrivacySettings) -> bool:
    """Return whether devices must know settings of a secure sum that older devices do not."""
    return privacy.same_cohort or privacy.secure_spare != SPARE


def transform_of(privacy: PrivacySettings, configured: ConfiguredMethod) -> dict[str, dict[str, Any]]:
    """Return the transform that carries secure aggregation out, as [transforms] has it; empty without it."""
    if not privacy.secure_aggregation:
        return {}
    more: dict[str, Any] = {"spare": privacy.secure_spare, "same_cohort": privacy.same_cohort} if knows_more(privacy) else {}
    more |= {"exact": True} if configured.objective.adds_up else {}
    uniform = {settings.uniform for settings in configured.aggregators.values() if isinstance(settings, MeanSettings)}
    return {
        SECURE_SUM: {
            "clip": privacy.secure_clip,
            "devices": privacy.secure_devices,
            "samples": privacy.secure_samples,
            "norm": privacy.secure_norm,
            "uniform": True in uniform,
            **more,
        }
    }


def short_step(settings: AggregatorSettings) -> str:
    """Explain why the server's step is below a tenth of the usual; empty if it is not.

    Sums of the same updates over other devices, from starts that are nearly the same, tell single updates.
    """
    if isinstance(settings, HypernetworkSettings):
        named, step, usual = "server_lr", settings.lr, msgspec.structs.replace(settings, server_lr=None).lr
        return _below(named, step, usual, step)
    if not isinstance(settings, MeanSettings):
        return ""
    optimiser, adaptivity = settings.shared_optimiser, settings.shared_adaptivity
    if optimiser == "none":
        return _below("server_mix", settings.server_mix, 1.0, settings.server_mix)
    usually = MeanSettings(shared_optimiser=optimiser)
    step, usual = settings.step, usually.step
    if optimiser == "momentum":  # it adds whole changes up, whatever the momentum
        return _below("shared_lr", step, usual, step)
    step, usual = step * (1 - settings.momentum), usual * (1 - usually.momentum)
    slow = settings.step >= TENTH * usually.step
    why = _below("shared_momentum" if slow else "shared_lr", step, usual, settings.momentum if slow else settings.step)
    return why or _below("shared_adaptivity", step / adaptivity, usual / usually.shared_adaptivity, adaptivity)


def _below(name: str, step: float, usual: float, value: float) -> str:
    return f"method.{name} = {value:g} makes them {step / usual:.2g} times as large" if step < TENTH * usual else ""


def check_profile(privacy: PrivacySettings, profile: Profile, name: str) -> None:
    """Check that a device declares no sums of its own data, which would reach the server unprotected.

    Raises:
        SettingError: It does.
    """
    sums = {"standardises over the federation": profile.columns, "has numbers to predict": profile.targets}
    for what, columns in sums.items():
        if privacy.secure_aggregation and columns is not None:
            raise SettingError(
                f"the shard of {name} {what}, and {name} sends sums of its data, which {ON} refuses: start it with "
                "--disclose masked-statistics, or without --disclose"
            )


def weighted(plan: Plan, profiles: Mapping[str, Profile]) -> Plan:
    """Return the plan with the number of samples that has the weight 1: the largest of the devices of round 1."""
    if SECURE_SUM not in plan.transforms:
        return plan
    settings = plan.transforms[SECURE_SUM] | {"most_samples": max(profile.samples for profile in profiles.values())}
    return msgspec.structs.replace(plan, transforms=merge(plan.transforms, {SECURE_SUM: settings}))
