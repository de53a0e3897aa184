"""Secure aggregation in the settings of a run: what it turns off, and what it cannot be combined with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from attune.common.config import PrivacySettings, RoundSettings, merge
from attune.common.errors import SettingError
from attune.common.exchange.registry import SECURE_SUM
from attune.common.methods.method import ConfiguredMethod, Method
from attune.common.methods.settings.aggregators import HypernetworkSettings, MeanSettings
from attune.common.plan import Plan, Profile
from attune.common.protocol import MOST_MEMBERS, SPARE

ON = "privacy.secure_aggregation"


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


def transform_of(privacy: PrivacySettings, configured: ConfiguredMethod) -> dict[str, dict[str, Any]]:
    """Return the transform that carries secure aggregation out, as [transforms] has it; empty without it."""
    if not privacy.secure_aggregation:
        return {}
    spare = {"spare": privacy.secure_spare} if privacy.secure_spare != SPARE else {}  # older devices do not know it
    uniform = {settings.uniform for settings in configured.aggregators.values() if isinstance(settings, MeanSettings)}
    return {
        SECURE_SUM: {
            "clip": privacy.secure_clip,
            "devices": privacy.secure_devices,
            "samples": privacy.secure_samples,
            "norm": privacy.secure_norm,
            "uniform": True in uniform,
            **spare,
        }
    }


def check_settings(
    privacy: PrivacySettings, configured: ConfiguredMethod, rounds: RoundSettings, given: Mapping[str, Any]
) -> None:
    """Check what secure aggregation cannot be combined with.

    Args:
        privacy: The section [privacy].
        configured: The method.
        rounds: The section [round].
        given: The names of the transforms that were given.

    Raises:
        SettingError: It names the setting.
    """
    if SECURE_SUM in given:
        raise SettingError(f"transforms.{SECURE_SUM} is set by {ON}; set that one")
    if not privacy.secure_aggregation:
        return
    for part, settings in configured.aggregators.items():
        on_device = isinstance(settings, HypernetworkSettings) and settings.on_device
        if not isinstance(settings, MeanSettings) and not on_device:
            other = 'set method.embedding = "device", or ' if isinstance(settings, HypernetworkSettings) else ""
            raise SettingError(
                f"{ON} gives the server sums alone, and method {configured.method.name} has {part} parts that are no means: "
                f"{other}choose a method with shared parts, such as fedavg, fedper or fedbn"
            )
        if isinstance(settings, MeanSettings) and settings.robust != "none":
            raise SettingError(f"{ON} and method.robust cannot be combined: a robust rule compares single updates")
    least, spare = privacy.secure_devices, privacy.secure_spare
    wrong = {
        "round.take_back: it looks at losses of single devices": rounds.take_back > 0,
        'round.train = "all": each round must start from what the server serves': rounds.train == "all",
        "round.adapt_rounds: few newcomers make no sum": rounds.adapt_rounds > 0,
        f"privacy.secure_spare = {spare}: set privacy.secure_devices to {2 * spare + 1} or more": least <= 2 * spare,
        f"round.min_clients = {rounds.min_clients}: sums have at least {least} devices": rounds.min_clients < least,
        f"round.quorum = {rounds.quorum}: sums have at least {least} devices": 0 < rounds.quorum < least,
        f"round.clients = {rounds.clients}: sums have {least} to {MOST_MEMBERS} devices": bool(rounds.clients)
        and not least <= rounds.clients * (1 + rounds.over_selection) <= MOST_MEMBERS,
    }
    for why, is_wrong in wrong.items():
        if is_wrong:
            raise SettingError(f"{ON} cannot be combined with {why}")


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
