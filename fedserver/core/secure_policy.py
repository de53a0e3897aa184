"""Secure aggregation in the decisions of a run: what it turns off, what the plan says of it, its cohorts, and its waits."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import msgspec

from attune.common.config import PrivacySettings, RoundSettings, merge
from attune.common.errors import SettingError
from attune.common.exchange.registry import SECURE_SUM
from attune.common.methods.method import ConfiguredMethod, Method
from attune.common.methods.settings.aggregators import AggregatorSettings, HypernetworkSettings, MeanSettings
from attune.common.plan import FEWEST_DEVICES, Plan, Profile
from attune.common.protocol import SPARE
from attune.common.text import listed
from attune.fedserver.core.messages import Phase
from attune.fedserver.core.policy import FEW, SHOWN, Asked, Synchronous
from attune.fedserver.core.state import STEPS, FleetPace, Round, indebted
from attune.fedserver.core.voices import MOST_VOTE

ON, CLIENT = "privacy.secure_aggregation", 'privacy.unit = "client"'
TENTH = 0.1 * (1 - 1e-9)  # of a usual step, with the error of rounding


def defaults_of(privacy: PrivacySettings, method: Method) -> dict[str, Any]:
    """Return the defaults where sums alone are read, or have noise: nothing that looks at single updates, and large rounds.

    Raises:
        SettingError: The method shares nothing.
    """
    if not privacy.secure_aggregation and not privacy.on_server:
        return {}
    if set(method.kinds) <= {"private"}:
        why = f"{ON} could sum" if privacy.secure_aggregation else f"{CLIENT} could protect"
        raise SettingError(f"method {method.name} shares nothing that {why}")
    least = {"min_clients": privacy.secure_devices} if privacy.secure_aggregation else {}
    return {"method": {"bound_change": 0.0, "bound_samples": 0.0}, "round": {"take_back": 0.0, **least}}


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


def no_sums(privacy: PrivacySettings, devices: Collection[str], able: Collection[str]) -> str:
    """Return why no device hands in sums over its samples under these settings; empty: it may. Those in `able` can."""
    if privacy.unit != "none":
        return "with privacy.unit no sums over samples are handed in, for they have no noise"
    if privacy.secure_aggregation and privacy.secure_devices < FEWEST_DEVICES:
        return (
            f"privacy.secure_aggregation cannot be combined with privacy.secure_devices = {privacy.secure_devices}: sums over "
            f"samples have at least {FEWEST_DEVICES} devices"
        )
    if privacy.secure_aggregation and len(devices) < FEWEST_DEVICES:
        return f"behind masks it takes {FEWEST_DEVICES} devices"
    if privacy.secure_aggregation and (lacking := set(devices) - set(able)):
        return (
            f"{len(lacking)} of {len(devices)} devices were in such a sum before, and a home is in one; or they scale columns "
            "by themselves, or need an update"
        )
    return ""


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
    """Return the plan with the number of samples that has the weight 1: the largest of the devices of round 1.

    It is at most MOST_VOTE medians: beside a larger lie all other updates would weigh nothing.
    """
    if SECURE_SUM not in plan.transforms:
        return plan
    samples = [profile.samples for profile in profiles.values()]
    settings = plan.transforms[SECURE_SUM] | {"most_samples": min(max(samples), MOST_VOTE * median_low(samples))}
    return msgspec.structs.replace(plan, transforms=merge(plan.transforms, {SECURE_SUM: settings}))


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
        if able < least <= len(state.inside):
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
        return state.inside - frozenset(self.settings.left_out)


EXCHANGES = 5  # of a sum: `round.grace_s` is for all of them together


@dataclass(frozen=True)
class ExchangeWait:
    """An exchange under way.

    Attributes:
        kind: Its name among the fleet's paces.
        asked: The devices that were asked.
        pending: Those of them whose answer is missing.
        took: Seconds that each of the others needed.
        least: How many answers a sum needs.
        longest_s: Seconds for which it may wait at most.
    """

    kind: str
    asked: frozenset[str]
    pending: frozenset[str]
    took: Mapping[str, float]
    least: int
    longest_s: float

    def patience_s(self, settings: RoundSettings, state: Round, now: float) -> float:
        """Return for how many seconds from its beginning the exchange waits; 0: nobody who is missing is waited for."""
        able = self.pending - self._spared(settings, state, now)
        if not able:
            return 0.0
        if not settings.deadline_multiple or len(able) > FEW * len(self.asked):
            return self.longest_s
        return min(self.longest_s, self._pace(state).patience_s(able, self._fair_s(settings, state)))

    def costs(self, settings: RoundSettings, state: Round, waited_s: float, now: float) -> dict[str, float]:
        """Return for how many seconds others waited for each device that was silent, or far slower than the fleet.

        If most devices are silent it is the exchange, and none of them is charged.
        """
        last_s, few = max(self.took.values(), default=0.0), 2 * len(self.pending) <= len(self.asked)
        silent = self.pending - self._spared(settings, state, now) if few else ()
        costs = dict.fromkeys(silent, waited_s - last_s)
        if settings.deadline_multiple and state.pace.get(self.kind, FleetPace()).steps >= STEPS:
            fair_s, usual_s = self._fair_s(settings, state), self._pace(state).usual_s
            late = {name: seconds - usual_s for name, seconds in self.took.items() if seconds > fair_s}
            costs |= late if len(late) <= FEW * len(self.asked) else {}
        return {name: cost_s for name, cost_s in costs.items() if cost_s > 0}

    def _spared(self, settings: RoundSettings, state: Round, now: float) -> frozenset[str]:
        """Return the missing devices in debt, if they are a minority and there can be a sum without them."""
        debtors = indebted(state.missed, now) & self.pending
        few = 2 * len(debtors) <= len(self.asked) and len(self.asked - debtors) >= self.least
        return debtors if few and settings.deadline_multiple else frozenset()

    def _pace(self, state: Round) -> FleetPace:
        """Return the fleet's pace; in the first exchanges of this kind with the answers to the open one."""
        pace = state.pace.get(self.kind, FleetPace())
        return pace.after(self.took) if pace.steps < STEPS else pace

    def _fair_s(self, settings: RoundSettings, state: Round) -> float:
        """Return the seconds that a device may take without a debt."""
        return max(settings.grace_s / EXCHANGES, settings.deadline_multiple * self._pace(state).usual_s)
