"""Search of settings for the methods of a comparison, on validation parts of the training parts. No test part is looked at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from attune.common.config import load_settings, merge
from attune.common.errors import AttuneError, together
from attune.fedserver.choosing.candidates import ComparedMethod
from attune.simulation.compared_methods import Comparison
from attune.simulation.grid import TrialSettings, best, parse_grid
from attune.simulation.result_table import Cell, ResultTable
from attune.simulation.simulate import simulate
from attune.simulation.validation import validation_members


@dataclass(frozen=True)
class GridTrial:
    """One method with one choice of settings.

    Attributes:
        method: Name of the method.
        settings: Its settings, each as section.key=value.
        kept: Mean over devices of the score of what they keep, on validation parts.
    """

    method: str
    settings: TrialSettings
    kept: float


@dataclass(frozen=True)
class GridSearch:
    """Trials of methods, and what they have chosen.

    Attributes:
        trials: The trials in their order.
        settings: The settings of the grid that were chosen for each method.
        chosen: The methods with all their settings.
    """

    trials: Sequence[GridTrial]
    settings: Mapping[str, TrialSettings]
    chosen: Sequence[ComparedMethod]

    def lines(self) -> list[str]:
        """Return for each method a line with its settings, and from how many they were chosen."""
        counts = Counter(trial.method for trial in self.trials)
        return [
            f"{name}: {' '.join(settings)}, the best of {counts[name]} on validation parts of the training data"
            if counts[name]
            else f"{name}: {' '.join(settings) or 'none of the settings of the grid'}, without a choice"
            for name, settings in self.settings.items()
        ]

    def table(self) -> ResultTable:
        """Return a row for each trial."""
        rows: list[list[Cell]] = [[trial.method, " ".join(trial.settings), trial.kept] for trial in self.trials]
        return ResultTable(("method", "settings", "kept"), rows)


def search(
    comparison: Comparison,
    methods: Sequence[ComparedMethod],
    texts: Sequence[str],
    seed: int,
    executor: Any,
    say: Callable[[str], None],
) -> GridSearch:
    """Try the grid for each method, and choose the settings with which devices keep the best on validation parts.

    A method with a single choice is not tried. All settings are checked before anything trains.

    Args:
        comparison: The comparison.
        methods: Its methods with their settings.
        texts: Values of each key, as `section.key=VALUE,VALUE`.
        seed: Seed of the trials, which also decides which training samples are used for validation.
        executor: Same as in `attune.simulate`.
        say: Takes a line about each trial.

    Raises:
        AttuneError: A setting is unknown or wrong, or no device has enough training samples.
    """
    grid = parse_grid(texts, [method.name for method in methods])
    prepared = _prepared(comparison, methods, grid)
    members = validation_members(comparison.members, seed)
    trials: list[GridTrial] = []
    settings_of: dict[str, TrialSettings] = {}
    for method in methods:
        scores: dict[TrialSettings, float] = {}
        for settings in grid[method.name] if len(grid[method.name]) > 1 else ():
            given = merge(prepared[method.name, settings], {"seed": seed})
            train, evaluate = comparison.hooks.train, comparison.hooks.evaluate
            result = simulate(members, method.name, settings=given, executor=executor, train=train, evaluate=evaluate)
            kept = result.table().mean("kept")
            assert kept is not None  # noqa: S101 (some device has a validation part)
            scores[settings] = kept
            say(f"{method.name} with {' '.join(settings)}: {kept:.3f} on validation parts")
        trials += [GridTrial(method.name, settings, kept) for settings, kept in scores.items()]
        settings_of[method.name] = best(scores) if scores else grid[method.name][0]
    chosen = [replace(method, settings=prepared[method.name, settings_of[method.name]]) for method in methods]
    return GridSearch(trials, settings_of, chosen)


def _prepared(
    comparison: Comparison, methods: Sequence[ComparedMethod], grid: Mapping[str, Sequence[TrialSettings]]
) -> dict[tuple[str, TrialSettings], Mapping[str, Any]]:
    """Return all settings of each method and trial, checked.

    Raises:
        SettingError: Some are wrong. It names the problems of all trials.
    """
    prepared: dict[tuple[str, TrialSettings], Mapping[str, Any]] = {}
    problems: dict[str, Exception] = {}
    for method in methods:
        for settings in grid[method.name]:
            try:
                prepared[method.name, settings] = merge(method.settings, load_settings(None, settings, {}))
                comparison.check(method.name, prepared[method.name, settings])
            except AttuneError as error:
                problems[f"{method.name} with {' '.join(settings)}"] = error
    if problems:
        raise together(problems)
    return prepared


def as_options(entrants: Mapping[str, Mapping[str, Any]], chosen: Mapping[str, TrialSettings]) -> dict[str, dict[str, Any]]:
    """Return the options of the candidates of a race (auto.candidates), with settings that were chosen for each.

    Args:
        entrants: The settings of each, before the choice.
        chosen: The chosen settings of each, as `section.key=value`.
    """
    options: dict[str, dict[str, Any]] = {}
    for name, settings in entrants.items():
        picked = load_settings(None, chosen.get(name, ()), {})
        method = {key: value for key, value in {**settings["method"], **picked.pop("method", {})}.items() if key != "name"}
        others = {
            f"{section}.{key}": value for section, of in picked.items() if isinstance(of, Mapping) for key, value in of.items()
        }
        options[name] = method | others
    return options
