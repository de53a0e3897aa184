"""Secure aggregation in the settings of a run: what it turns off, and what it cannot be combined with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from attune.common.config import PrivacySettings, RoundSettings, merge
from attune.common.errors import SettingError
from attune.common.exchange.registry import SECURE_SUM
from attune.common.methods.method import ConfiguredMethod, Method
from attune.common.methods.settings.aggregators import ClosedFormSettings, HypernetworkSettings, MeanSettings
from attune.common.plan import FEWEST_DEVICES, Plan, Profile
from attune.common.protocol import MOST_MEMBERS, SPARE

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
        if privacy.same_cohort or rounds.left_out:
            raise SettingError(f"privacy.same_cohort and round.left_out are for secure sums: they need {ON} = true")
        return
    for part, settings in configured.aggregators.items():
        on_device = isinstance(settings, HypernetworkSettings) and settings.on_device
        if not isinstance(settings, (ClosedFormSettings, MeanSettings)) and not on_device:
            other = 'set method.embedding = "device", or ' if isinstance(settings, HypernetworkSettings) else ""
            raise SettingError(
                f"{ON} gives the server sums alone, and method {configured.method.name} has {part} parts that are no means: "
                f"{other}choose a method with shared parts, such as fedavg, fedper or fedbn"
            )
        if isinstance(settings, MeanSettings) and settings.robust != "none":
            raise SettingError(f"{ON} and method.robust cannot be combined: a robust rule compares single updates")
        if isinstance(settings, (MeanSettings, HypernetworkSettings)) and (why := short_step(settings)):
            raise SettingError(f"{ON} needs steps of the server that are a tenth of the usual ones or more, and {why}")
    least, spare = privacy.secure_devices, privacy.secure_spare
    few = (
        f"privacy.secure_devices = {least}: sums over samples have at least {FEWEST_DEVICES} devices. With fewer, do without "
        "(fedclient --disclose sums), or take another method"
    )
    wrong = {
        few: configured.objective.adds_up and least < FEWEST_DEVICES,
        "round.take_back: it looks at losses of single devices": rounds.take_back > 0,
        'round.train = "all": each round must start from what the server serves': rounds.train == "all",
        "round.adapt_rounds: few newcomers make no sum": rounds.adapt_rounds > 0,
        f"privacy.secure_spare = {spare}: set privacy.secure_devices to {2 * spare + 1} or more": least <= 2 * spare,
        "round.left_out without privacy.same_cohort": bool(rounds.left_out) and not privacy.same_cohort,
        "round.over_selection and privacy.same_cohort: no device takes another one's place": privacy.same_cohort
        and rounds.over_selection > 0,
        f"round.min_clients = {rounds.min_clients}: sums have at least {least} devices": rounds.min_clients < least,
        f"round.quorum = {rounds.quorum}: sums have at least {least} devices": 0 < rounds.quorum < least,
        f"round.clients = {rounds.clients}: sums have {least} to {MOST_MEMBERS} devices": bool(rounds.clients)
        and not least <= rounds.clients * (1 + rounds.over_selection) <= MOST_MEMBERS,
    }
    for why, is_wrong in wrong.items():
        if is_wrong:
            raise SettingError(f"{ON} cannot be combined with {why}")


def short_step(settings: MeanSettings | HypernetworkSettings) -> str:
    """Explain why the server's step is below a tenth of the usual; empty if it is not.

    Sums of the same updates over other devices, from starts that are nearly the same, tell single updates.
    """
    if isinstance(settings, HypernetworkSettings):
        named, step, usual = "server_lr", settings.lr, msgspec.structs.replace(settings, server_lr=None).lr
        return _below(named, step, usual, step)
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
