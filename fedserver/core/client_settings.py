"""Client-level privacy in the settings of a run: what it turns off, what it excludes, and how much noise it needs.

The cohort's data may reach what is served through the noisy sum of clipped changes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from attune.common.config import PrivacySettings, RoundSettings, ServerSettings, TrainSettings
from attune.common.errors import SettingError
from attune.common.methods.method import ConfiguredMethod, Method
from attune.common.methods.settings.aggregators import HypernetworkSettings, MeanSettings
from attune.common.plan import DataSettings, Profile
from attune.common.privacy.accountant import NoisySteps, epsilon_of, noise_for

ON = 'privacy.unit = "client"'
# benchmarks.client_level_generated, means of seeds 0 to 2
GENERATED = " (with 1,000 devices and epsilon = 8, FedTP was tried and has an accuracy of 0.65, FedPer of 0.83)"


def client_defaults(privacy: PrivacySettings, method: Method) -> dict[str, Any]:
    """Return the defaults under client-level privacy: nothing that depends on the data of a cohort.

    Raises:
        SettingError: The method shares nothing.
    """
    if not privacy.on_server:
        return {}
    if set(method.kinds) <= {"private"}:
        raise SettingError(f"{ON} protects what devices share, and method {method.name} shares nothing")
    return {"method": {"bound_change": 0.0, "bound_samples": 0.0}, "round": {"take_back": 0.0}}


def check_client(
    privacy: PrivacySettings,
    configured: ConfiguredMethod,
    rounds: RoundSettings,
    server: ServerSettings,
    train: TrainSettings,
) -> None:
    """Check what client-level privacy cannot be combined with.

    Raises:
        SettingError: It names the setting.
    """
    if not privacy.on_server:
        if privacy.clip_quantile is not None:
            raise SettingError(f"privacy.clip_quantile needs {ON}: elsewhere no noisy count of changes is made")
        return
    _check_parts(configured)
    if privacy.epsilon is None and privacy.noise is None:
        raise SettingError(f"{ON} needs privacy.epsilon or privacy.noise")
    if privacy.devices < 1:
        raise SettingError(f"{ON} needs privacy.devices, the number of devices in the federation: sums are divided by it")
    if rounds.clients > privacy.devices:
        raise SettingError(f"round.clients = {rounds.clients} is more than privacy.devices = {privacy.devices}")
    values: dict[str, Any] = {}
    for settings in configured.aggregators.values():
        values |= msgspec.structs.asdict(settings)
    single, draw = "it compares single updates", "only independent draws of each device may be counted on"
    wrong = {
        "privacy.secure_aggregation: the server clips single updates": privacy.secure_aggregation,
        f"method.bound_change: {single}": values["bound_change"] > 0,
        f"method.bound_samples: {single}": values["bound_samples"] > 0,
        f"method.robust: {single}": values["robust"] != "none",
        "server.max_update_norm: changes are clipped, and a refusal tells their norm": server.max_update_norm > 0,
        "round.take_back: it looks at losses of single devices": rounds.take_back > 0,
        "train.finish_stop: the likelihoods of all devices choose what each is told": train.finish_stop == "fleet",
        "round.adapt_rounds: newcomers' rounds have no noise": rounds.adapt_rounds > 0,
        'round.train = "all": each round must start from what the server serves': rounds.train == "all",
        f"round.quorum: {draw}": rounds.quorum > 0,
        f"round.over_selection: {draw}": rounds.over_selection > 0,
        f"round.replace_after_s: {draw}": rounds.replace_after_s > 0,
        f"round.attackers: {draw}": rounds.attackers > 0,
    }
    for why, is_wrong in wrong.items():
        if is_wrong:
            raise SettingError(f"{ON} cannot be combined with {why}")


def _check_parts(configured: ConfiguredMethod) -> None:
    name = configured.method.name
    for part, settings in configured.aggregators.items():
        if not isinstance(settings, MeanSettings):
            why = GENERATED if isinstance(settings, HypernetworkSettings) else ""
            raise SettingError(
                f"{ON} is for methods whose devices share one value, such as fedavg, fedper or mr-mtl; method {name} has "
                f'{part} parts, of which each device gets another value{why}. Take privacy.unit = "example" for them'
            )


def check_public(privacy: PrivacySettings, declared: DataSettings, profile: Profile) -> None:
    """Check that the operator declares what the plan would otherwise take from the devices' data.

    Raises:
        SettingError: It names the setting.
    """
    if not privacy.on_server:
        return
    why = "otherwise the plan would tell the other devices of one device's data"
    if profile.task == "classes" and not declared.classes:
        raise SettingError(f"{ON} needs data.classes: {why}")
    if profile.kind == "tokens" and not declared.vocabulary:
        raise SettingError(f"{ON} needs data.vocabulary: {why}")
    if profile.schema is not msgspec.UNSET and declared.schema is None:
        raise SettingError(f"{ON} needs data.columns, the schema: {why}")


def check_secret(privacy: PrivacySettings) -> None:
    """Check that the noise of a server for real devices is secret.

    Raises:
        SettingError: It comes from a seed.
    """
    if privacy.on_server and privacy.insecure_seed is not None:
        raise SettingError("privacy.insecure_seed protects nobody: it is for simulations alone. Leave it out")


def drawn_rate(privacy: PrivacySettings, rounds: RoundSettings) -> float:
    """Return the chance q with which a round draws each device."""
    return rounds.clients / privacy.devices if rounds.clients else 1.0


def expected_devices(privacy: PrivacySettings, rounds: RoundSettings) -> int:
    """Return q n, the number of devices by which each sum is divided, however many answer."""
    return rounds.clients or privacy.devices


def releases(privacy: PrivacySettings, rounds: RoundSettings, count: int) -> Sequence[NoisySteps]:
    """Return what `count` released sums cost, for the accountant."""
    return [NoisySteps(drawn_rate(privacy, rounds), privacy.noise or 0.0, count)]


def with_noise(privacy: PrivacySettings, rounds: RoundSettings) -> PrivacySettings:
    """Return the settings with the noise multiplier in force.

    Raises:
        SettingError: The noise that was set is too small for the epsilon that was set; or dp-accounting is not installed.
    """
    if not privacy.on_server or privacy.epsilon is None:
        return privacy
    if privacy.noise is None:
        noise = noise_for(privacy.epsilon, privacy.delta, drawn_rate(privacy, rounds), rounds.rounds)
        return msgspec.structs.replace(privacy, noise=noise)
    cost = epsilon_of(releases(privacy, rounds, rounds.rounds), privacy.delta)
    if cost > privacy.epsilon:
        raise SettingError(
            f"privacy.noise = {privacy.noise:g} costs epsilon = {cost:.3g} in {rounds.rounds} rounds, and privacy.epsilon is "
            f"{privacy.epsilon:g}: leave privacy.noise out, and the smallest that is enough is taken"
        )
    return privacy
