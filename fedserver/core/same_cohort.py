"""Rounds whose secure sums are all over the same devices: sums over other ones, subtracted, tell single updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attune.common.text import listed
from attune.fedserver.core.messages import Phase
from attune.fedserver.core.policy import SHOWN, Asked, Synchronous
from attune.fedserver.core.state import Round


@dataclass(frozen=True)
class SameCohortRounds(Synchronous):
    """Rounds with the devices of the first sum (`privacy.same_cohort`); without one of them none opens.

    The operator may go on without some of them (`round.left_out`), if a majority is left out: what the sums before and after
    differ by is then a sum itself. Devices see to both.
    """

    def refuses(self, state: Round) -> str:
        if state.record.phase is not Phase.WAITING or state.record.round >= (state.record.last or self.settings.rounds):
            return ""
        cohort = state.record.same_cohort
        left, least = sorted({*cohort} & {*self.settings.left_out}), len(cohort) // 2 + 1
        if left and len(left) < least:
            return (
                f"round.left_out names {listed(left, SHOWN)} of the {len(cohort)} devices of all sums: name at least {least} "
                "of them, or none (privacy.same_cohort)"
            )
        if not left and (missing := sorted({*cohort} - state.connected)):
            return (
                f"{listed(missing, SHOWN)} of the {len(cohort)} devices of all sums must be here (privacy.same_cohort): start "
                f"them, or leave at least {least} of the {len(cohort)} out (round.left_out)"
            )
        able, least = len(self._candidates(state)), self.settings.min_clients
        if able < least <= len(state.connected):
            return f"round.left_out leaves {able} devices, and round.min_clients is {least}"
        return super().refuses(state)

    def ask(self, state: Round) -> Asked:
        cohort = state.record.same_cohort
        if cohort and not {*cohort} & {*self.settings.left_out}:
            return Asked(cohort, cohort)
        return super().ask(state.but(connected=self._candidates(state)))

    def ask_again(self, state: Round) -> frozenset[str]:
        """Ask no idle device: it is not of the cohort."""
        return (state.awaited | frozenset(state.record.excused)) & state.connected

    def extends(self, state: Round, now: float) -> bool:
        return now >= state.deadline

    def replacements(self, state: Round, now: float) -> tuple[tuple[str, str], ...]:
        """Return no pairs: in a sum no device takes another one's place."""
        return ()

    def slow(self, state: Round) -> Mapping[str, float]:
        """Return no device: each one is needed, however slow."""
        return {}

    def _candidates(self, state: Round) -> frozenset[str]:
        """Return the connected devices that the operator has not left out."""
        return state.connected - frozenset(self.settings.left_out)
