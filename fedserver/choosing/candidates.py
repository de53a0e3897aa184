"""Candidates of a comparison of methods: their settings, and one model for all that can use it, tried with the devices' data.

Everything is tried before anything trains, so that all problems are named at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import msgspec

from attune.common.config import PrivacySettings, TrainSettings, by_section, convert, merge
from attune.common.errors import AttuneError, SettingError, together
from attune.common.methods import registry as methods
from attune.common.methods.fit import NO_PRIVACY, check_model
from attune.common.models.registry import model_for, why_not_usual
from attune.common.plan import Plan, Profile
from attune.fedserver.choosing.racing import ALONE, CLOSED_FORM, FEWEST_ROUNDS, NOTHING_HELD_OUT, rungs_of
from attune.fedserver.core import planning
from attune.fedserver.core.training_length import round_settings

Complete = Callable[[str, Mapping[str, Any]], Mapping[str, Any]]  # returns all settings of a method, from its name and settings
NOWHERE = "tried"  # the federation of a plan that is thrown away
USUAL: Mapping[str, Mapping[str, Any]] = {CLOSED_FORM: {}, "fedavg": {}, "fedper": {}, "fedtp": {}, "fedmcsa": {"dial": True}}
NEEDS_ATTENTION = "fedtp"  # no usual candidate for tables, on which attention needs many samples
OF_THE_RACE = (
    "round.rounds",
    "round.patience",
    "round.mode",
    "train.score_after",
    "train.validation",
)  # by which candidates are compared


class AutoSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The race of methods of `--method auto`: docs/choosing.md."""

    # Methods in the race: a list of names, or a table of method settings for each name. Empty: those of docs/choosing.md.
    candidates: tuple[str, ...] | dict[str, dict[str, Any]] = ()


@dataclass(frozen=True)
class ComparedMethod:
    """A method with its settings.

    Attributes:
        settings: By section, in the shape of a federation.toml.
        why: Why it cannot use the model of the other methods, or why all have its model; empty: neither.
    """

    name: str
    settings: Mapping[str, Any]
    why: str = ""


@dataclass(frozen=True)
class Fitting:
    """Choice of models for several methods on the same data.

    Attributes:
        names: The methods, in order.
        profiles: Description of each device's data.
        model: The model that the user chose for all methods, if any.
        overrides: Function that completes a method's settings.
        sums: Devices that hand in sums over their samples.
    """

    names: Sequence[str]
    profiles: Mapping[str, Profile]
    model: str | None
    overrides: Complete
    sums: Collection[str] = ()

    def fitted(
        self,
        given: Mapping[str, Mapping[str, Any]],
        models: Mapping[str, Mapping[str, Any]],
        problems: Mapping[str, Exception] = MappingProxyType({}),
        hinted: Callable[[Exception, Sequence[str]], Exception] = lambda error, others: error,
    ) -> list[ComparedMethod]:
        """Return the methods with one model for all that can use it, tried with these data.

        Args:
            given: Settings of each method, by section.
            models: What the user said about the model of each method alone.
            problems: What is wrong with the settings of methods already.
            hinted: Function that adds a hint to an error about a method, from the names of the methods that have no problem.

        Raises:
            SettingError: A method, setting or model is unknown or cannot be used. It names the problems of all methods.
        """
        settings, resolved, problems = dict(given), dict[str, planning.ResolvedSettings](), dict(problems)
        for name in settings:
            try:
                resolved[name] = planning.resolve(self.overrides(name, {**settings[name], "model": {}}))
            except AttuneError as error:
                problems[name] = error
        if problems:
            raise together({name: hinted(error, list(resolved)) for name, error in problems.items()})
        chosen, why = (self.model, {}) if self.model else self._usual_for_all(resolved, settings)
        for name in self.names if chosen else ():
            settings[name] = merge(settings[name], {"model": {"name": models[name].get("name", chosen)}})
        tried = self._tried(settings, models, "" if self.model else chosen or "")
        return [method if method.why else replace(method, why=why.get(method.name, "")) for method in tried]

    def _usual_for_all(
        self, resolved: Mapping[str, planning.ResolvedSettings], settings: Mapping[str, Mapping[str, Any]]
    ) -> tuple[str | None, dict[str, str]]:
        """Return a model for all methods whose settings name none, and by method why all have it if it is not the usual one.

        None if the usual model of all of them is the same.
        """
        data = next(iter(self.profiles.values()))
        free = [name for name, of in settings.items() if not of.get("model", {}).get("name")]
        roles = {name: planning.roles_of(resolved[name].method, resolved[name].privacy) for name in free}
        having = {name: of for name, of in roles.items() if _model_for(data, of)}
        whys = {name: why for name, of in having.items() if (why := _why_not_usual(data, of, name))}
        if len({_model_for(data, of) for of in roles.values()}) <= 1:
            return None, whys
        common = _model_for(data, frozenset().union(*roles.values()))
        return (common, whys) if common else (_model_for(data, frozenset()), {})

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

    def check(self, name: str, settings: Mapping[str, Any]) -> Plan:
        """Make the plan and the model of a method, as a server does before round 1, and return the plan.

        Raises:
            SettingError: The settings do not fit the data, or the model does not fit the method.
        """
        resolved = planning.resolve(self.overrides(name, settings))
        plan = planning.make_plan(resolved, self.profiles, NOWHERE, fewest=1, sums=self.sums)
        check_model(plan.model, resolved.configured, resolved.seed, plan.privacy or NO_PRIVACY, plan.task)
        return plan


def _model_for(data: Profile, roles: frozenset[str]) -> str:
    """Return the usual model for these data and roles; empty if no built-in model has them."""
    try:
        return model_for(data.kind, roles, per_position=data.per_position)
    except SettingError:
        return ""


def _why_not_usual(data: Profile, roles: frozenset[str], name: str) -> str:
    return why_not_usual(data.kind, roles, name, per_position=data.per_position)


def check_race(overrides: Mapping[str, Any]) -> int:
    """Check settings with `auto` as the method's name, as far as that is possible without data.

    Returns:
        The number of rounds.

    Raises:
        SettingError: They allow no race.
    """
    settings = round_settings(overrides.get("round", {}))
    if settings.mode != "synchronous":
        raise SettingError(
            'round.mode = "buffered": --method auto compares candidates after rounds of all devices: leave it out'
        )
    rounds = settings.rounds
    if rounds < FEWEST_ROUNDS:
        raise SettingError(f"--method auto needs {FEWEST_ROUNDS} rounds at least, to compare methods on the way; not {rounds}")
    if not convert(TrainSettings, overrides.get("train", {}), "train.").validation:
        raise SettingError(NOTHING_HELD_OUT)
    if convert(PrivacySettings, overrides.get("privacy", {}), "privacy.").unit != "none":
        raise SettingError("--method auto does not go with [privacy]: every candidate would spend a budget. Name a method")
    if overrides.get("model", {}).get("variant"):
        raise SettingError("--method auto cannot be combined with model.variant: candidates have one model. Name a method")
    if others := sorted(overrides["method"].keys() - {"name"}):
        raise SettingError(
            f"method.{others[0]} cannot be set for all candidates of auto; give it to one of them: "
            f"auto.candidates.fedavg.{others[0]} = ... (candidates are those that are named then)"
        )
    return rounds


@dataclass(frozen=True)
class Entrants:
    """Those that take part in a race.

    Attributes:
        settings: Settings of ALONE, which comes first, and of each candidate.
        left_out: Why usual candidates are left out, by name.
    """

    settings: Mapping[str, Mapping[str, Any]]
    left_out: Mapping[str, str]


def common_settings(overrides: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """Return the settings of all entrants: those given, with scores after each rung."""
    given = {key: value for key, value in overrides.items() if key != "auto"}
    scored = [*rungs_of(rounds), rounds]
    if round_settings(given.get("round", {})).patience:  # all candidates train as long
        given = merge(given, {"round": {"rounds": rounds, "patience": 0}})
    return merge(given, {"train": {"score_after": scored}})


def entrants_of(
    overrides: Mapping[str, Any], profiles: Mapping[str, Profile], complete: Complete, sums: Collection[str]
) -> Entrants:
    """Return the entrants for the devices' data: methods with their models.

    Each method has its usual model for these data, unless the settings name a model: then all that can use it have it.

    Args:
        overrides: As in `check_race`.
        profiles: Description of each device's data.
        complete: As `Fitting.overrides`.
        sums: As `Fitting.sums`.

    Raises:
        SettingError: A named candidate, or every usual one, is unknown or cannot be used.
    """
    named, common = named_candidates(overrides), common_settings(overrides, check_race(overrides))
    left_out: dict[str, str] = {}
    options = named or _usual(common, Fitting((), profiles, None, complete, sums), left_out)
    names = [ALONE, *(name for name in options if name != ALONE)]
    if len(names) < 2:
        raise SettingError(
            "; ".join(dict.fromkeys(left_out.values()))
            or f"auto.candidates names no method beside {ALONE}, which takes part anyway"
        )
    settings, model = {name: with_options(common, name, options.get(name, {})) for name in names}, common.get("model", {})
    together = [names] if model.get("name") else [[name] for name in names]
    compared = [
        method
        for some in together
        for method in Fitting(some, profiles, None, complete, sums).fitted(
            {name: settings[name] for name in some}, dict.fromkeys(some, model)
        )
    ]
    return Entrants({method.name: method.settings for method in compared}, left_out)


def named_candidates(overrides: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the options of the candidates that are named.

    Raises:
        SettingError: One of them has a setting that must be the same for all candidates.
    """
    given = convert(AutoSettings, overrides.get("auto", {}), "auto.").candidates
    named = dict(given) if isinstance(given, Mapping) else {name: {} for name in given}
    for name, options in named.items():
        if refused := [key for key in options if key in OF_THE_RACE or key.startswith("privacy.")]:
            raise SettingError(f"auto.candidates: {refused[0]} of {name} must be that of the race: set it for all candidates")
    return named


def with_options(common: Mapping[str, Any], name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of one entrant. Options without a dot are settings of its method, the others have a section.

    ALONE uses nothing of other devices, and CLOSED_FORM nothing but the closed form.
    """
    method = {key: value for key, value in options.items() if "." not in key}
    others = {key: value for key, value in options.items() if "." in key}
    settings = merge({**common, "method": {**method, "name": ALONE if name == CLOSED_FORM else name}}, by_section(others))
    if name == CLOSED_FORM:
        return merge({"round": {"analytic": "auto"}}, settings)
    return merge(settings, {"round": {"analytic": "off"}}) if name == ALONE else settings


def _usual(common: Mapping[str, Any], fitting: Fitting, left_out: dict[str, str]) -> dict[str, Mapping[str, Any]]:
    """Return the usual candidates that can be used here, with their settings; the others are added to `left_out`."""
    model, usable = common.get("model", {}), dict[str, Mapping[str, Any]]()
    data = next(iter(fitting.profiles.values()))
    for name, options in USUAL.items():
        if not model.get("name") and name == NEEDS_ATTENTION and data.kind == "tabular":
            left_out[name] = _why_not_usual(data, planning.roles_of(methods.get(name)), name)
            continue
        try:
            [method] = replace(fitting, names=[name]).fitted({name: with_options(common, name, options)}, {name: model})
            if name == CLOSED_FORM and not (plan := fitting.check(name, method.settings)).closed_form:
                raise SettingError(plan.no_closed_form or "round.analytic is off")
            usable[name] = options
        except AttuneError as error:
            left_out[name] = str(error)
    return usable
