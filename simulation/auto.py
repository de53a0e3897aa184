"""`--method auto`: a race of methods over the same shards, which ends with the best one for these devices.

`fedserver.core.racing` decides. Here the candidates are trained from rung to rung, each as a run of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attune.common.config import AutoSettings, PrivacySettings, RoundSettings, TrainSettings, convert, merge
from attune.common.errors import AttuneError, FederationFailed, SettingError
from attune.common.methods import registry as methods
from attune.common.models.registry import lacking
from attune.fedclient.data.holdout import FEWEST
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedserver.core import planning
from attune.fedserver.core.racing import (
    ALONE,
    FEWEST_ROUNDS,
    KEPT,
    RaceResult,
    Rung,
    Scores,
    at_end,
    at_rung,
    rungs_of,
    scored_by_all,
)
from attune.simulation.compared_methods import Comparison
from attune.simulation.progress import Watcher
from attune.simulation.result import SimulationResult
from attune.simulation.simulation_state import MemoryState
from attune.simulation.simulator import Simulator

USUAL: Mapping[str, Mapping[str, Any]] = {"fedavg": {}, "fedper": {}, "fedtp": {}, "fedmcsa": {"dial": True}}
_REMEDY = f"devices need {FEWEST} training samples and train.validation above 0. Name a method instead of auto"
NEEDS_ATTENTION = "fedtp"  # a usual candidate only where the usual model for the data has attention


def race(simulator: Simulator, overrides: Mapping[str, Any], folder: Path | None, shown: Watcher) -> SimulationResult:
    """Train the candidates from rung to rung, and return the winner's result with the course of the race.

    Args:
        simulator: Runs federations over the shards.
        overrides: The settings, in the shape of a federation.toml, with `auto` as the method's name.
        folder: Folder for all state, with a folder for each candidate. None: memory.
        shown: Shows the progress.

    Raises:
        SettingError: Settings do not fit together, or no device holds samples out by which a method could be chosen.
        AttuneError: As in `Simulator.run`, for training alone.
    """
    rounds = _checked_rounds(overrides, simulator.members)
    settings, left_out = _entrants(overrides, simulator.members, (*rungs_of(rounds), rounds))
    try:
        return _Race(simulator, settings, left_out, folder, LegWatcher(shown, len(simulator.members))).run(rounds)
    finally:
        shown.end()


class _Race:
    """A race under way.

    Args:
        simulator: Runs federations.
        settings: Settings of each entrant, ALONE first.
        left_out: Why candidates take no part; those that fail are added.
        folder: Folder for all state, if any.
        legs: Shows the progress.
    """

    def __init__(
        self,
        simulator: Simulator,
        settings: Mapping[str, Mapping[str, Any]],
        left_out: dict[str, str],
        folder: Path | None,
        legs: LegWatcher,
    ) -> None:
        self._simulator, self._settings, self._left_out, self._legs = simulator, settings, left_out, legs
        members = simulator.members
        self._places = {name: folder / name if folder else MemoryState(members) for name in settings}
        self._results: dict[str, SimulationResult] = {}

    def run(self, rounds: int) -> SimulationResult:
        racing, rungs, before = [name for name in self._settings if name != ALONE], list[Rung](), 0
        for number, stop in enumerate(rungs_of(rounds)):
            scores = self._scores((ALONE, *racing), before, stop, rounds)
            candidates = {name: of for name, of in scores.items() if name != ALONE}
            if candidates:
                rungs.append(Rung(stop, scores, at_rung(number, candidates)))
            racing, before = list(rungs[-1].decision.kept) if candidates else [], stop
            self._places = {name: self._places[name] for name in (ALONE, *racing)}  # memory of the others is freed
        last = self._scores((ALONE, *racing), before, rounds, rounds)
        decision = at_end(last, [rung.scores for rung in rungs])
        result = RaceResult([*rungs, Rung(rounds, last, decision)], self._left_out)
        winner = self._results[result.chosen]
        winner.auto, winner.rivals = result, {name: self._results[name] for name in last if name != result.chosen}
        return winner

    def _scores(self, names: Sequence[str], before: int, stop: int, rounds: int) -> dict[str, Scores]:
        """Train these entrants from round to round, and return their scores. A candidate that fails is left out.

        Raises:
            SettingError: There is no device that all have scored.
            AttuneError: Training alone has failed.
        """
        scores: dict[str, Scores] = {}
        later = (1 + KEPT) * (rounds - stop) + max(0, len(names) - 1 - KEPT) * (rungs_of(rounds)[1] - stop)
        for place, name in enumerate(names, 1):
            self._legs.rounds_left = (len(names) - place) * (stop - before) + later
            try:
                result = self._simulator.run(
                    self._settings[name], self._places[name], self._legs, stop if stop < rounds else None
                )
            except (FederationFailed, SettingError) as error:
                if name == ALONE:
                    raise
                self._left_out[name] = f"it failed before round {stop} was over: {error}"
                continue
            self._results[name], scores[name] = result, result.scores(stop)
        if not scored_by_all(scores):
            raise SettingError(f"no device holds samples out by which a method could be chosen; {_REMEDY}")
        return scores


def _checked_rounds(overrides: Mapping[str, Any], members: Mapping[str, LazyShard]) -> int:
    """Return the number of rounds, if the settings and the data allow a race.

    Raises:
        SettingError: They do not.
    """
    rounds = convert(RoundSettings, overrides.get("round", {}), "round.").rounds
    if rounds < FEWEST_ROUNDS:
        raise SettingError(f"--method auto needs {FEWEST_ROUNDS} rounds at least, to compare methods on the way; not {rounds}")
    validation = convert(TrainSettings, overrides.get("train", {}), "train.").validation
    if not validation or all(shard.profile.samples < FEWEST for shard in members.values()):
        raise SettingError(f"no device holds samples out by which a method could be chosen; {_REMEDY}")
    if convert(PrivacySettings, overrides.get("privacy", {}), "privacy.").unit != "none":
        raise SettingError("--method auto does not go with [privacy]: every candidate would spend a budget. Name a method")
    if others := sorted(overrides["method"].keys() - {"name"}):
        raise SettingError(
            f"method.{others[0]} cannot be set for all candidates of auto; give it to one of them: "
            f"auto.candidates.fedavg.{others[0]} = ... (candidates are those that are named then)"
        )
    return rounds


def _entrants(
    overrides: Mapping[str, Any], members: Mapping[str, LazyShard], scored: Sequence[int]
) -> tuple[dict[str, Mapping[str, Any]], dict[str, str]]:
    """Return the settings of ALONE and of each candidate, and why usual candidates are left out, by name.

    All candidates that can use one model have the same.

    Raises:
        SettingError: A named candidate, or every usual one, is unknown or cannot be used.
    """
    given = convert(AutoSettings, overrides.get("auto", {}), "auto.").candidates
    named = given if isinstance(given, Mapping) else {name: {} for name in given}
    common = merge({"train": {"finish": "auto"}}, {key: value for key, value in overrides.items() if key != "auto"})
    common = merge(common, {"train": {"score_after": list(scored)}})
    left_out: dict[str, str] = {}
    options = named or _usual(common, members, left_out)
    names = [ALONE, *(name for name in options if name != ALONE)]
    if len(names) < 2:
        raise SettingError(
            "; ".join(left_out.values()) or f"auto.candidates names no method beside {ALONE}, which takes part anyway"
        )
    settings = {name: {**common, "method": {**options.get(name, {}), "name": name}} for name in names}
    compared = Comparison(names, members).fitted(settings, dict.fromkeys(names, common.get("model", {})))
    return {method.name: method.settings for method in compared}, left_out


def _usual(
    common: Mapping[str, Any], members: Mapping[str, LazyShard], left_out: dict[str, str]
) -> dict[str, Mapping[str, Any]]:
    """Return the usual candidates that can be used here, with their settings; the others are added to `left_out`."""
    kind, chosen = next(iter(members.values())).profile.kind, common.get("model", {}).get("name")
    usable: dict[str, Mapping[str, Any]] = {}
    for name, options in USUAL.items():
        if not chosen and name == NEEDS_ATTENTION and lacking(kind, planning.roles_of(methods.get(name))):
            left_out[name] = f"the usual model for {kind} has no attention"
            continue
        try:
            settings = {name: {**common, "method": {**options, "name": name}}}
            Comparison([name], members).fitted(settings, {name: common.get("model", {})})
            usable[name] = options
        except AttuneError as error:
            left_out[name] = str(error)
    return usable


class LegWatcher:
    """Watcher that shows all runs of a race as one piece of work.

    The work that is left is an upper bound, so the share that is done never falls.
    """

    def __init__(self, inner: Watcher, devices: int) -> None:
        self._inner, self._per_round, self._done, self.rounds_left = inner, 2 * devices, 0, 0

    def begin(self, orders: int) -> None:
        self._inner.begin(self._done + orders + self._per_round * self.rounds_left)

    def order_done(self) -> None:
        self._done += 1
        self._inner.order_done()

    def end(self) -> None:
        """No-op: other runs follow."""
