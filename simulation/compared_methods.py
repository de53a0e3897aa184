"""Methods of one comparison: the settings of each, and one model for all methods that can use it.

Everything is tried before anything trains, so that all problems are named at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attune.common.config import load_settings, merge
from attune.common.errors import AttuneError, SettingError, together
from attune.common.methods import registry as methods
from attune.common.plan import Profile
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.options import NONE, Hooks
from attune.fedserver.choosing.candidates import ComparedMethod, Fitting
from attune.simulation.arguments import overrides


@dataclass(frozen=True)
class Comparison:
    """Methods to compare on the same shards, and their common arguments.

    Attributes:
        names: The methods, in the order of the table.
        members: The shard of each device.
        model: The model that the user chose for all methods, if any.
        rounds: Number of rounds, if given.
        seed: Seed of every random draw, if given.
        hooks: The user's own training and scores.
    """

    names: Sequence[str]
    members: Mapping[str, LazyShard]
    model: str | None = None
    rounds: int | str | None = None
    seed: int | None = None
    hooks: Hooks = NONE

    @property
    def profiles(self) -> dict[str, Profile]:
        """Description of each device's data."""
        return {name: shard.profile for name, shard in self.members.items()}

    def methods(self, config: Path | None, assignments: Sequence[str]) -> list[ComparedMethod]:
        """Return the methods, tried with these data.

        Args:
            config: A federation.toml, for all methods.
            assignments: Settings as `section.key=value`, for all methods, or `METHOD:section.key=value`, for one of them.

        Raises:
            SettingError: A method, setting or model is unknown or cannot be used. It names the problems of all methods.
        """
        common, single = _by_method(assignments, self.names)
        flags = ({} if self.rounds is None else {"round": {"rounds": self.rounds}}) | (
            {} if self.seed is None else {"seed": self.seed}
        )
        settings: dict[str, dict[str, Any]] = {}
        alone: dict[str, dict[str, Any]] = {}
        problems: dict[str, Exception] = {}
        for name in self.names:
            try:
                alone[name] = load_settings(None, single[name], {})
                settings[name] = merge(load_settings(config, common, flags), alone[name])
            except AttuneError as error:
                problems[name] = error
        models = {name: of.get("model", {}) for name, of in alone.items()}
        return self.fitted(settings, models, problems, common)

    def fitted(
        self,
        given: Mapping[str, Mapping[str, Any]],
        models: Mapping[str, Mapping[str, Any]],
        problems: Mapping[str, Exception] = MappingProxyType({}),
        common: Sequence[str] = (),
    ) -> list[ComparedMethod]:
        """Return the methods with one model for all that can use it, tried with these data.

        Args:
            given: Settings of each method, by section.
            models: What the user said about the model of each method alone.
            problems: What is wrong with the settings of methods already.
            common: The assignments for all methods, for hints.

        Raises:
            SettingError: As in `methods`.
        """
        fitting = Fitting(self.names, self.profiles, self.model, self._overrides)
        return fitting.fitted(given, models, problems, lambda error, others: _with_hint(error, common, others))

    def check(self, name: str, settings: Mapping[str, Any]) -> None:
        """Make the plan and the model of a method, as a server does before round 1.

        Raises:
            SettingError: A setting is wrong, or the model does not fit the method.
        """
        Fitting(self.names, self.profiles, self.model, self._overrides).check(name, settings)

    def _overrides(self, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        return overrides(len(self.members), name, None, None, None, settings)


def _by_method(assignments: Sequence[str], names: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the assignments for all methods, and those for single methods.

    Raises:
        SettingError: Assignments name methods that are unknown or not compared. It names all of them.
    """
    common: list[str] = []
    single: dict[str, list[str]] = {name: [] for name in names}
    problems: dict[str, Exception] = {}
    for text in assignments:
        method, colon, rest = text.partition("=")[0].partition(":")
        if not colon or (method not in single and "." in method):
            common.append(text)
        elif method in single and rest == "method.name":
            problems[f"--set {text}"] = SettingError(f"--set {text}: --method names the methods")
        elif method in single and rest:
            single[method].append(text[len(method) + 1 :])
        else:
            problems[f"--set {text}"] = _no_method(text, method, names)
    if problems:
        raise together(problems)
    return common, single


def _no_method(text: str, method: str, names: Sequence[str]) -> SettingError:
    if not method or method in names:
        return SettingError(f"--set takes section.key=value, or METHOD:section.key=value for one method, not {text!r}")
    try:
        methods.get(method)
    except SettingError as error:
        return error
    return SettingError(f"--set {text}: {method} is not among the methods of this comparison ({', '.join(names)})")


def _with_hint(error: Exception, common: Sequence[str], others: Sequence[str]) -> Exception:
    """Return an error about a setting of all methods that only another method has, with the way to give it to that one."""
    for text in common:
        key = text.partition("=")[0]
        lacking = f"no setting {key} " in str(error) or (key == "method.preset" and "no settings as" in str(error))
        if others and key.startswith("method.") and lacking:
            return SettingError(f"{error}; for one method alone: --set {others[0]}:{text}")
    return error
