"""A method: which part each tensor belongs to, an aggregator for each part, an objective and a predictor.

Importable without torch; only `assign` reads a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import msgspec

from attune.common.config import EVERYDAY, PLAIN, PRESETS, PUBLISHED, S, convert, keys_of, merge
from attune.common.errors import SettingError, nearest
from attune.common.methods.settings.aggregators import SETTINGS as AGGREGATORS
from attune.common.methods.settings.aggregators import AggregatorSettings, AttentionSettings, ChangeElsewhere, Returns
from attune.common.methods.settings.objectives import OBJECTIVES, PREDICTORS, ObjectiveSettings, PredictorSettings
from attune.common.plan import ModelSpec
from attune.common.task import TaskName

if TYPE_CHECKING:
    from torch import nn

SOLVED: Final = "solved"  # the closed form that joins the blends of every method (Plan.closed_form): no tensor of the model
PartKind = Literal["shared", "attended", "generated", "private", "solved"]
AssignedKind = Literal["shared", "attended", "generated", "private"]
EvaluatedAs = Literal["served", "trained"]

UNBOUNDED = {"bound_change": 0.0, "bound_samples": 0.0}  # as published: no paper bounds what a device hands in
# As published: no paper holds training samples out to weigh models, or takes rounds back.
WHOLE_TRAINING: Mapping[str, Mapping[str, float]] = {"train": {"validation": 0.0}, "round": {"take_back": 0.0}}
# The rest that no paper has; with `train.validation` 0 no models are blended.
EXTRAS_OFF = merge(WHOLE_TRAINING, {"train": {"clip_norm": 0.0}, "round": {"deadline_multiple": 0.0}})
DEFAULT_AGGREGATORS: Mapping[PartKind, str] = {"shared": "mean", "attended": "attention", "generated": "hypernetwork"}


@dataclass(frozen=True)
class Method:
    """One row of the table of methods.

    Attributes:
        name: Name in settings.
        citation: The paper, or "ours".
        parts: Pairs (selector, kind); the first match wins. A selector is `@role` (common.models.structure), or a glob over
            the names of tensors.
        objective: Name of the objective of local training.
        predictor: Name of the predictor.
        aggregators: Name of the aggregator for each kind of part.
        evaluate: Which model an accuracy measures: the one that was served, or the one after local training.
        defaults: Settings for everyday use, in the shape of federation.toml.
        published: Settings of the paper, which replace `defaults`. Empty: the method has no such preset.
        published_with: Further settings of the paper for single models, by the model's name.
    """

    name: str
    citation: str
    parts: tuple[tuple[str, PartKind], ...]
    objective: str = "sgd"
    predictor: str = "model"
    aggregators: Mapping[PartKind, str] = field(default_factory=lambda: dict(DEFAULT_AGGREGATORS))
    evaluate: EvaluatedAs = "served"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    published: Mapping[str, Any] = field(default_factory=dict)
    published_with: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def preset(self, name: str, model: str | None) -> dict[str, Any]:
        """Return the settings of a preset, in the shape of federation.toml.

        Raises:
            SettingError: The method does not have the preset.
        """
        if name == EVERYDAY:
            return dict(self.defaults)
        if name == PLAIN:
            return merge(self.defaults, {"method": self.unbounded, **EXTRAS_OFF})
        if name != PUBLISHED:
            raise SettingError(f"unknown preset {name!r}{nearest(name, PRESETS)}")
        if not self.published:
            raise SettingError(f"method {self.name} has no settings as published; docs/methods says what its paper uses")
        given = merge(self.published, self.published_with.get(model or "", {}))
        return merge(given, {"method": self.unbounded, **WHOLE_TRAINING})

    @property
    def unbounded(self) -> Mapping[str, float]:
        """The settings under which what a device hands in has no bound; none where it hands in nothing."""
        return UNBOUNDED if set(self.kinds) != {"private"} else {}

    @property
    def kinds(self) -> tuple[PartKind, ...]:
        """The kinds of part that this method can have, in the order they are first named."""
        return tuple(dict.fromkeys(kind for _, kind in self.parts))


class CustomMethod(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A user's own row: the [method] table with name = "custom"."""

    # Selector to `shared`, `attended`, `generated` or `private`; the first match wins. A selector without a match is an
    # error, and so is a tensor that no selector matches.
    parts: dict[str, AssignedKind]
    # Name of an objective.
    objective: str = "sgd"
    # Name of a predictor.
    predictor: str = "model"
    # Aggregator for each kind of part. Default: mean for shared, attention for attended, hypernetwork for generated.
    aggregators: dict[AssignedKind, str] = {}
    # Model that an accuracy measures: what the server serves, or the device's model after training.
    evaluate: EvaluatedAs = "served"


ROW_KEYS = keys_of(CustomMethod)


@dataclass(frozen=True)
class ConfiguredMethod:
    """A method with the typed settings of each of its components, defaults filled in. Settings are parsed once, into this."""

    method: Method
    aggregators: Mapping[PartKind, AggregatorSettings]
    objective: ObjectiveSettings
    predictor: PredictorSettings

    @property
    def dial(self) -> AttentionSettings | None:
        """The attended part's settings, if each device chooses its own mixture of it."""
        part = self.aggregators.get("attended")
        return part if isinstance(part, AttentionSettings) and part.dial else None

    def spec_of(self, spec: ModelSpec) -> ModelSpec:
        """Return the model's spec with what this method keeps beside the model's tensors."""
        return msgspec.structs.replace(spec, feature_mean=True) if self.objective.needs_feature_mean else spec


def custom_method(options: Mapping[str, Any], aggregators_elsewhere: bool = False) -> Method:
    """Make a method from the [method] table of a user.

    Args:
        options: The table.
        aggregators_elsewhere: Accept an unknown name of an aggregator, because another machine runs it.

    Raises:
        SettingError: It names what is missing, unknown or impossible.
    """
    row = convert(CustomMethod, {key: value for key, value in options.items() if key in ROW_KEYS}, "method.")
    if not row.parts:
        raise SettingError('method.parts is empty: set the part of each tensor, such as \'"*" = "shared"\'')
    _check_known("objective", row.objective, OBJECTIVES)
    _check_known("predictor", row.predictor, PREDICTORS)
    for kind, name in row.aggregators.items():
        if kind == "private" or not aggregators_elsewhere:
            _check_known(f"aggregators.{kind}", name, {} if kind == "private" else AGGREGATORS)
    return Method(
        name="custom",
        citation="defined in this federation's settings",
        parts=tuple(row.parts.items()),
        objective=row.objective,
        predictor=row.predictor,
        aggregators={**DEFAULT_AGGREGATORS, **cast(Mapping[PartKind, str], row.aggregators)},
        evaluate=row.evaluate,
    )


def setting_names(method: Method) -> frozenset[str]:
    """Return the names of the settings that a method's [method] table may have.

    Raises:
        SettingError: A component of the method is not known here.
    """
    structs, _ = _aggregators_of(method, None)
    return _all_keys(
        *structs.values(),
        OBJECTIVES.require(method.objective, "objective"),
        PREDICTORS.require(method.predictor, "predictor"),
    )


def _all_keys(*structs: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset[str]().union(*map(keys_of, structs))


def configure(method: Method, options: Mapping[str, Any], returns: Mapping[str, Returns] | None = None) -> ConfiguredMethod:
    """Parse the [method] table, over the method's defaults: each component gets the keys that it declares.

    Args:
        method: The method.
        options: The table.
        returns: On a device, what it hands in of each part whose aggregator is a plug-in of the server: "values" where none
            is named. Such an aggregator's settings are not looked at, and a stand-in takes their place. None: no stand-ins.

    Raises:
        SettingError: For a key that no component of this method declares, or a value out of range.
    """
    row_keys = {"name"} | (ROW_KEYS if method.name == "custom" else set())
    values = merge(method.defaults.get("method", {}), {key: value for key, value in options.items() if key not in row_keys})
    structs, elsewhere = _aggregators_of(method, returns)
    objective = OBJECTIVES.require(method.objective, "objective")
    predictor = PREDICTORS.require(method.predictor, "predictor")
    known = _all_keys(*structs.values(), objective, predictor)
    for key in values:
        if key not in known and not elsewhere:
            hint = nearest(key, known) if known else " (it has none)"
            raise SettingError(f"method {method.name} has no setting method.{key}{hint}")

    def dealt(struct: type[S]) -> S:
        return convert(struct, {key: value for key, value in values.items() if key in keys_of(struct)}, "method.")

    aggregators = {kind: dealt(struct) for kind, struct in structs.items()} | elsewhere
    configured = ConfiguredMethod(method, aggregators, dealt(objective), dealt(predictor))
    if configured.dial and configured.predictor.own_model:
        raise SettingError(f"method.dial: a device of {method.name} predicts with a model of its own, which has no dial")
    return configured


def _aggregators_of(
    method: Method, returns: Mapping[str, Returns] | None
) -> tuple[dict[PartKind, type[AggregatorSettings]], dict[PartKind, AggregatorSettings]]:
    """Return the settings to parse of each part that leaves the device, and stand-ins for those of the server's plug-ins."""
    structs: dict[PartKind, type[AggregatorSettings]] = {}
    elsewhere: dict[PartKind, AggregatorSettings] = {}
    for kind in method.kinds:
        name = method.aggregators.get(kind, "")
        if kind != "private" and returns is not None and name not in AGGREGATORS.built_in:
            elsewhere[kind] = ChangeElsewhere() if returns.get(kind) == "change" else AggregatorSettings()
        elif kind != "private":
            structs[kind] = AGGREGATORS.require(name, "aggregator")
    return structs, elsewhere


def check_task(configured: ConfiguredMethod, task: TaskName) -> None:
    """Refuse a method for a task that it cannot do.

    Raises:
        SettingError: It says what to take instead.
    """
    unsolved = {"survival": "the Cox loss has no closed form", "custom": "a loss of your own has no known closed form"}
    if task in unsolved and configured.objective.adds_up:
        raise SettingError(
            f"method {configured.method.name} cannot be used for {task}: {unsolved[task]}. Take fedavg (method.name)"
        )
    why = configured.objective.only_classes or configured.predictor.only_classes
    if task != "classes" and why:
        raise SettingError(f"method {configured.method.name} cannot be used for {task}: {why} (method.name)")


def assign(method: Method, model: nn.Module) -> dict[str, PartKind]:
    """Return the kind of every tensor of the model.

    Raises:
        SettingError: A selector matches no tensor (named with method and model), no selector matches a tensor, or a tensor
            cannot be generated because it holds integers.
    """
    from attune.common.models.body import names_of
    from attune.common.models.structure import roles, tensors_of

    tensors, role_of = tensors_of(model), roles(model)
    model_name = type(model).__name__
    result: dict[str, PartKind] = {}
    for selector, kind in method.parts:
        role = selector.removeprefix("@")
        matched = [name for name in tensors if (fnmatchcase(name, selector) if role == selector else role in role_of[name])]
        if not matched:
            outside = " outside its frozen body" if names_of(model) else ""
            raise SettingError(
                f"method {method.name}: no tensor of the model {model_name}{outside} is {selector!r}; "
                "choose a model that has such tensors, or another method"
            )
        for name in matched:
            result.setdefault(name, kind)
    for name, tensor in tensors.items():
        if name not in result:
            raise SettingError(f'method {method.name}: no selector matches {name} of {model_name}; end with \'"*" = "shared"\'')
        if result[name] == "generated" and not tensor.is_floating_point():
            raise SettingError(f"method {method.name}: {name} of {model_name} holds integers, which cannot be generated")
    return {name: result[name] for name in tensors}


def _check_known(key: str, name: str, choices: Mapping[str, object]) -> None:
    if name not in choices:
        hint = nearest(name, choices) if choices else " (this part never leaves the device)"
        raise SettingError(f"method.{key}: unknown {name!r}{hint}")
