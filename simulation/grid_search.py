"""Search of settings for the methods of a comparison, on validation parts of the training parts. No test part is looked at.

The tables of the papers use the same grids. A method may not have other training settings to choose from than its rivals;
otherwise the grid would decide, not the method.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from attune.common.config import load_settings, merge, parse_assignment
from attune.common.errors import AttuneError, SettingError, ShardError, together
from attune.common.methods.method import setting_names
from attune.common.methods.registry import get
from attune.fedclient.data.holdout import FEWEST_SAMPLES, Indices, hold_out, strata
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.data.shard import Shard
from attune.fedserver.choosing.candidates import ComparedMethod
from attune.simulation.compared_methods import Comparison
from attune.simulation.result_table import Cell, ResultTable
from attune.simulation.simulate import simulate

SHARE = 0.25  # share of each device's training samples that is used for validation


def validation_places(shard: Shard, share: float, seed: int) -> tuple[Indices, Indices]:
    """Return which training samples stay for training, and which are used for validation, both ascending."""
    return hold_out(strata(shard.train_y, shard.task), share, seed, shard.kind, shard.groups)


def validation_shard(shard: Shard, share: float, seed: int) -> Shard:
    """Return a shard with a share of the training part as its test part. It has the same classes, and no real test sample."""
    train, held = validation_places(shard, share, seed)
    return replace(
        shard,
        train_x=shard.train_x[train],
        train_y=shard.train_y[train],
        test_x=shard.train_x[held],
        test_y=shard.train_y[held],
        groups=None if shard.groups is None else shard.groups[train],
        test_groups=None if shard.groups is None else shard.groups[held],
        declared_classes=shard.labels,
        warnings=(),
        held_hashes=(),
    )


def validation_members(members: Mapping[str, LazyShard], seed: int, share: float = SHARE) -> dict[str, LazyShard]:
    """Return for each device the shard that `validation_shard` cuts; samples are read when they are needed.

    Raises:
        ShardError: No device has enough training samples.
    """
    cut = {}
    for name, member in members.items():
        load = partial(_load, member.load, share, seed)
        shard = load()
        cut[name] = LazyShard(member.name, shard.profile(), (), load, shard.read, shard.digest)
    if not any(member.profile.test_samples for member in cut.values()):
        raise ShardError(
            f"no device has {FEWEST_SAMPLES} training samples, of which a part could be cut to choose settings: "
            "leave --grid out"
        )
    return cut


def _load(load: Callable[[], Shard], share: float, seed: int) -> Shard:
    return validation_shard(load(), share, seed)


SHARED = ("train.lr", "train.momentum", "train.batch_size")  # settings that must be the same for every method
_COMMA = re.compile(r",(?![^\[]*\])")  # a comma that is not within brackets

TrialSettings = tuple[str, ...]  # each as section.key=value


def trials(
    method: str, train: Sequence[Sequence[str]], alternatives: Sequence[Sequence[str]], most: int | None = None
) -> list[TrialSettings]:
    """Return the settings of each trial of a method: every choice of training with every alternative of the method.

    Args:
        method: Name of the method, for errors.
        train: Choices of training settings, the same for every method.
        alternatives: Choices of the method's settings.
        most: The largest number of trials; None for any number.

    Raises:
        SettingError: There are more, or an alternative has settings in SHARED.
    """
    if unequal := {_key(text) for settings in alternatives for text in settings} & set(SHARED):
        raise SettingError(f"the grid of {method} sets {', '.join(sorted(unequal))}, which `train` sets for every method alike")
    listed = [(*choice, *settings) for choice, settings in product(train, alternatives)]
    if most is not None and len(listed) > most:
        raise SettingError(f"the grid of {method} has {len(listed)} trials; at most {most}")
    return listed


def best(scores: Mapping[TrialSettings, float]) -> TrialSettings:
    """Return the settings with the best score on validation parts; of equal ones, the first."""
    return max(scores, key=lambda settings: scores[settings])


def parse_grid(texts: Sequence[str], methods: Sequence[str]) -> dict[str, list[TrialSettings]]:
    """Return the trials of each method from `--grid section.key=VALUE,VALUE`. A method has the keys that it knows.

    Args:
        texts: The values of each key.
        methods: Names of the methods.

    Raises:
        SettingError: It is no such text, a key comes twice, or no method has a setting of this name.
    """
    values: dict[str, list[str]] = {}
    for text in texts:
        key, equals, listed = text.partition("=")
        if not equals or "." not in key or ":" in key:
            raise SettingError(f"--grid takes section.key=VALUE,VALUE, for all methods that have the key; not {text!r}")
        if key in values:
            raise SettingError(f"--grid {key} comes twice: give all its values in one")
        values[key] = [f"{key}={value.strip()}" for value in dict.fromkeys(_COMMA.split(listed))]
    known = {name: {f"method.{key}" for key in setting_names(get(name))} for name in methods}
    for key in values:
        if key.startswith("method.") and not any(key in names for names in known.values()):
            raise SettingError(f"--grid {key}: none of {', '.join(methods)} has this setting")
    common = [values[key] for key in values if not key.startswith("method.")]
    return {
        name: trials(name, list(product(*common)), list(product(*(values[key] for key in values if key in names))))
        for name, names in known.items()
    }


def _key(assignment: str) -> str:
    return ".".join(parse_assignment(assignment)[0])


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
