"""Client-level privacy in the settings of a run: what it turns off, and how much noise it needs.

The cohort's data may reach what is served through the noisy sum of clipped changes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from attune.common.config import PrivacySettings, RoundSettings
from attune.common.errors import SettingError
from attune.common.methods.method import Method
from attune.common.plan import DataSettings, Profile
from attune.common.privacy.accountant import NoisySteps, epsilon_of, noise_for

ON = 'privacy.unit = "client"'


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
