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
from attune.common.methods.fit import NO_PRIVACY, check_model
from attune.common.models.registry import model_for
from attune.common.plan import Kind, Profile
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedserver.core import planning
from attune.simulation.arguments import overrides
from attune.simulation.federation import FEDERATION


@dataclass(frozen=True)
class ComparedMethod:
    """A method with its settings.

    Attributes:
        settings: By section, in the shape of a federation.toml.
        why: Why it cannot use the model of the other methods; empty if it has it.
    """

    name: str
    settings: Mapping[str, Any]
    why: str = ""


@dataclass(frozen=True)
class Comparison:
    """Methods to compare on the same shards, and their common arguments.

    Attributes:
        names: The methods, in the order of the table.
        members: The shard of each device.
        model: The model that the user chose for all methods, if any.
        rounds: Number of rounds, if given.
        seed: Seed of every random draw, if given.
    """

    names: Sequence[str]
    members: Mapping[str, LazyShard]
    model: str | None = None
    rounds: int | None = None
    seed: int | None = None

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
        settings, resolved, problems = dict(given), dict[str, planning.ResolvedSettings](), dict(problems)
        for name in settings:
            try:
                resolved[name] = planning.resolve(self._overrides(name, {**settings[name], "model": {}}))
            except AttuneError as error:
                problems[name] = error
        if problems:
            raise together({name: _with_hint(error, common, list(resolved)) for name, error in problems.items()})
        chosen = self.model or self._usual_for_all(resolved, settings)
        for name in self.names if chosen else ():
            settings[name] = merge(settings[name], {"model": {"name": models[name].get("name", chosen)}})
        return self._tried(settings, models, "" if self.model else chosen or "")

    def _overrides(self, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        return overrides(len(self.members), name, None, None, None, settings)

    def _usual_for_all(
        self, resolved: Mapping[str, planning.ResolvedSettings], settings: Mapping[str, Mapping[str, Any]]
    ) -> str | None:
        """Return a model for all methods whose settings name none; None if the usual model of all of them is the same."""
        kind = next(iter(self.members.values())).profile.kind
        free = [name for name, of in settings.items() if not of.get("model", {}).get("name")]
        roles = [planning.roles_of(resolved[name].method) for name in free]
        if len({_model_for(kind, of) for of in roles}) <= 1:
            return None
        return _model_for(kind, frozenset().union(*roles)) or model_for(kind, frozenset())

    def _tried(
        self, settings: Mapping[str, Mapping[str, Any]], models: Mapping[str, Mapping[str, Any]], chosen: str
    ) -> list[ComparedMethod]:
        """Try each method with its model, or else with its usual one, unless the user chose a model for this method alone.

        Args:
            settings: Settings of each method.
            models: What the user said about the model of each method alone.
            chosen: Name of the common model if the user has not chosen it.
        """
        failed: dict[str, Exception] = {}
        for name in self.names:
            try:
                self.check(name, settings[name])
            except SettingError as error:
                failed[name] = error
        if len(failed) == len(self.names):
            texts = {str(error) for error in failed.values()}
            reason = f"; the model of all methods is {chosen}, and --model names another" if chosen else ""
            raise SettingError(f"{texts.pop()}{reason}") if len(texts) == 1 else together(failed)
        compared, problems = [], {}
        for name in self.names:
            if name not in failed:
                compared.append(ComparedMethod(name, settings[name]))
                continue
            usual = {**settings[name], "model": models[name]}
            try:
                if "name" in models[name]:
                    raise failed[name]
                self.check(name, usual)
                model = settings[name].get("model", {}).get("name", "the model")
                compared.append(ComparedMethod(name, usual, f"{name} cannot use {model}: {failed[name]}"))
            except SettingError:
                problems[name] = failed[name]
        if problems:
            raise together(problems)
        return compared

    def check(self, name: str, settings: Mapping[str, Any]) -> None:
        """Make the plan and the model of a method, as a server does before round 1.

        Raises:
            SettingError: The settings do not fit the data, or the model does not fit the method.
        """
        resolved = planning.resolve(self._overrides(name, settings))
        plan = planning.make_plan(resolved, self.profiles, FEDERATION, fewest=1)
        check_model(plan.model, resolved.configured, resolved.seed, plan.privacy or NO_PRIVACY)


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


def _model_for(kind: Kind, roles: frozenset[str]) -> str:
    """Return the usual model for these roles; empty if no built-in model has them."""
    try:
        return model_for(kind, roles)
    except SettingError:
        return ""
