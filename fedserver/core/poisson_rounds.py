"""Rounds for client-level privacy: each device is drawn independently, in secret, and no decision compares devices."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from attune.common.seeds import derive
from attune.fedserver.core.policy import Asked, Synchronous
from attune.fedserver.core.state import Round


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
