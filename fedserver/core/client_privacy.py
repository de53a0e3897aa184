"""Client-level privacy in the decisions of a run: what it turns off, how much noise it needs, and whom a round asks.

The cohort's data may reach what is served through the noisy sum of clipped changes alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from attune.common.config import PrivacySettings, RoundSettings
from attune.common.errors import SettingError
from attune.common.plan import DataSettings, Profile
from attune.common.privacy.accountant import NoisySteps, epsilon_of, noise_for
from attune.common.seeds import derive
from attune.fedserver.core.policy import Asked, Synchronous
from attune.fedserver.core.state import Round

ON = 'privacy.unit = "client"'


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


@dataclass(frozen=True)
class PoissonRounds(Synchronous):
    """Rounds whose cohort is a Poisson sample of the connected devices; it may be empty.

    Amplification by sampling holds only if a device is in a sum with a known chance that depends on no other device. So no
    device takes another one's place, and a round waits for each of its devices until that one has answered, is gone or stalls,
    or until the deadline. The draws are made anew whenever a round opens; the record keeps the cohort.

    Attributes:
        rate: Chance of a device to be drawn.
        releases: Sums for which the noise was set; 0: no limit.
        insecure_seed: Seed of the draws in a simulation; None: the operating system's randomness.
    """

    rate: float
    releases: int = 0
    insecure_seed: int | None = None

    def refuses(self, state: Round) -> str:
        record = state.record
        if not self.releases or record.releases < self.releases or record.round >= self.settings.rounds:
            return ""
        return (
            f"privacy.epsilon is spent: {record.releases} sums were released, or may have been before the home was restored. "
            "End the run (`fedserver run stop`)"
        )

    def ask(self, state: Round) -> Asked:
        number = state.record.round + 1
        cohort = tuple(name for name in sorted(state.connected) if self._draw_of(number, name).random() < self.rate)
        return Asked(cohort, cohort)

    def _draw_of(self, number: int, name: str) -> random.Random:
        if self.insecure_seed is None:
            return random.SystemRandom()
        return random.Random(derive(self.insecure_seed, "poisson", number, name))  # noqa: S311 - named as insecure

    def complete(self, state: Round, now: float) -> bool:
        return self.over(state, now)

    def replacements(self, state: Round, now: float) -> tuple[tuple[str, str], ...]:
        """Return no pairs: a device in another one's place would be drawn with another chance."""
        return ()

    def extends(self, state: Round, now: float) -> bool:
        """Return False: a round needs no quorum."""
        return False

    def slow(self, state: Round) -> Mapping[str, float]:
        return {} if state.work == "train" else super().slow(state)

    def _unhurried(self, state: Round) -> bool:
        return state.work == "train" or super()._unhurried(state)

    def _waited_for(self, state: Round, now: float) -> Iterator[str]:
        if state.work != "train":
            return super()._waited_for(state, now)
        able = state.awaited - self._stalled(state, now)
        return (n for n in able if n in state.connected or now < state.left_at[n] + self.settings.grace_s)
