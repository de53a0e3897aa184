"""From the operator's settings and the devices' declarations to what is fixed for everyone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from attune.common.config import RoundSettings, ServerSettings, TrainSettings, convert, merge
from attune.common.errors import HomeMismatch, SettingError, ShapeMismatch, UndeclaredLabels
from attune.common.methods.method import Method, options_of
from attune.common.methods.registry import method_from_options
from attune.common.metrics import MAX_COUNT
from attune.common.models import registry as models
from attune.common.plan import Label, Plan, Profile
from attune.fedserver.core.adaptation import Adaptation, adaptation_of
from attune.fedserver.core.policy import Synchronous
from attune.fedserver.core.round import Rules

AFTER_THE_END = ("adapt_rounds", "adapt")
MAX_SAMPLE_VALUES = 1 << 28  # 1 GiB a sample


@dataclass(frozen=True)
class ResolvedSettings:
    """Every setting with its value: what was set, over the method's defaults, over the general ones."""

    method: Method
    method_options: dict[str, Any]  # as set
    model_name: str | None
    model_options: dict[str, Any]
    train: TrainSettings
    round: RoundSettings
    server: ServerSettings
    seed: int
    adaptation: Adaptation | None  # of newcomers; None: the method has nothing of a device's own

    @property
    def rules(self) -> Rules:
        """Of the round: without rounds for newcomers where these have nothing to fit."""
        settings = self.round if self.adaptation else msgspec.structs.replace(self.round, adapt_rounds=0)
        common = self.adaptation is not None and self.adaptation.common
        return Rules(settings, Synchronous(settings, self.seed), common)

    def fixed(self) -> dict[str, Any]:
        """What a home is bound to, flat, by the names under which it is set; the server section may change at a restart,
        and so may what is done with newcomers after the end."""
        sections = {
            "method": {"name": self.method.name} | _components(self.method, self.method_options),
            "model": {"name": self.model_name} | self.model_options,
            "train": msgspec.structs.asdict(self.train),
            "round": {key: value for key, value in msgspec.structs.asdict(self.round).items() if key not in AFTER_THE_END},
        }
        return {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()} | {
            "seed": self.seed
        }


def _components(method: Method, options: Mapping[str, Any]) -> dict[str, Any]:
    typed = options_of(method, options)
    values: dict[str, Any] = {}
    for struct in (*typed.aggregators.values(), typed.objective, typed.predictor):
        values |= msgspec.structs.asdict(struct)
    return values


def resolve(overrides: Mapping[str, Any]) -> ResolvedSettings:
    """Checks all that can be checked before a device has connected. Errors: SettingError with the nearest known name."""
    options = dict(overrides.get("method", {}))
    method = method_from_options(options)
    options.pop("name", None)
    options_of(method, options)
    full = merge(method.defaults, overrides)
    model = dict(full.get("model", {}))
    name = model.pop("name", None)
    models.check_options(name, model)
    rounds = convert(RoundSettings, full.get("round", {}), "round.")
    return ResolvedSettings(
        method=method,
        method_options=options,
        model_name=name,
        model_options=model,
        train=convert(TrainSettings, full.get("train", {}), "train."),
        round=rounds,
        server=convert(ServerSettings, full.get("server", {}), "server."),
        seed=int(full.get("seed", 0)),
        adaptation=adaptation_of(method, options, rounds.adapt),
    )


def reconcile(recorded: Mapping[str, Any] | None, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """What is set at this start, over what this home was made with. Errors: HomeMismatch that names every contradiction."""
    if recorded is None:
        return dict(overrides)
    merged = merge(recorded, overrides)
    before = resolve(recorded).fixed()
    named = overrides.get("method", {}).get("name", before["method.name"])
    # Of another method the settings on record may be unknown: that they are is not what is wrong.
    now = resolve(merged).fixed() if named == before["method.name"] else before | {"method.name": named}
    differing = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    if differing:
        changes = "; ".join(f"{key} is {before.get(key)!r} here, not {now.get(key)!r}" for key in differing)
        raise HomeMismatch(
            f"this home belongs to a federation with other settings: {changes}. Leave them out, or use a new --home"
        )
    return merged


def make_plan(settings: ResolvedSettings, profiles: Mapping[str, Profile], federation: str) -> Plan:
    """The plan for the devices present at round 1: classes are the sorted union of their labels. Errors: SettingError."""
    ordered = [profiles[name] for name in sorted(profiles)]
    labels: set[Label] = {label for profile in ordered for label in profile.labels}
    classes = sorted(labels, key=lambda label: (isinstance(label, str), label))
    first = ordered[0]
    spec = models.default_spec(
        first.kind,
        first.shape,
        len(classes),
        max(profile.vocabulary for profile in ordered),
        settings.model_name or models.model_for(first.kind, _roles_of(settings.method)),
        settings.model_options,
        first.per_position,
    )
    return Plan(
        federation=federation,
        seed=settings.seed,
        model=spec,
        classes=classes,
        method=settings.method.name,
        method_options=settings.method_options,
        train=settings.train,
    )


def why_this_model(settings: ResolvedSettings, plan: Plan) -> str:
    """Why a model was chosen that is not the usual one for this kind of data; empty if it is, or was named."""
    lacking = models.lacking(plan.model.kind, _roles_of(settings.method))
    if settings.model_name or not lacking:
        return ""
    return f"the usual model for {plan.model.kind} has no {', '.join(lacking)}, which method {plan.method} needs"


def _roles_of(method: Method) -> frozenset[str]:
    return frozenset(selector[1:] for selector, _ in method.parts if selector.startswith("@"))


def check_possible(profile: Profile, name: str) -> None:
    """Errors: SettingError for numbers that no shard has; they come from outside and go into the database and the model."""
    counts = {"samples": (1, profile.samples), "test_samples": (0, profile.test_samples), "vocabulary": (0, profile.vocabulary)}
    for field, (least, value) in counts.items():
        if not least <= value <= MAX_COUNT:
            raise SettingError(f"{name} declares {field} = {value}; it must lie between {least} and {MAX_COUNT}")
    if not 1 <= len(profile.shape) <= 3 or min(profile.shape) < 1 or math.prod(profile.shape) > MAX_SAMPLE_VALUES:
        raise SettingError(f"{name} declares samples of the impossible shape {profile.shape}")
    if profile.per_position and profile.kind != "tokens":
        raise SettingError(f"{name} declares a label for every position of {profile.kind}; only tokens can have that")
    if not profile.labels or len(set(profile.labels)) < len(profile.labels):
        raise SettingError(f"{name} declares no labels, or one of them twice")


def check_like(profile: Profile, reference: Profile, name: str) -> None:
    """Before there is a plan, all devices must declare data of one kind and shape, labelled alike. Errors: ShapeMismatch."""
    if (profile.kind, profile.shape) != (reference.kind, reference.shape):
        raise ShapeMismatch(_mismatch(name, profile, reference.kind, reference.shape))
    _check_labelled(name, profile.per_position, reference.per_position)


def check_fits(profile: Profile, plan: Plan, name: str) -> None:
    """Errors: ShapeMismatch, UndeclaredLabels if a device's shard does not fit the plan."""
    model = plan.model
    if (profile.kind, profile.shape) != (model.kind, model.shape):
        raise ShapeMismatch(_mismatch(name, profile, model.kind, model.shape))
    _check_labelled(name, profile.per_position, model.per_position)
    if model.kind == "tokens" and profile.vocabulary > model.vocabulary:
        raise ShapeMismatch(
            f"{name} has tokens up to {profile.vocabulary - 1}; this federation knows 0 to {model.vocabulary - 1}"
        )
    unknown = [label for label in profile.labels if label not in plan.classes]
    if unknown:
        raise UndeclaredLabels(f"{name} has labels {unknown}; the classes of this federation are fixed: {plan.classes}")


def _check_labelled(name: str, per_position: bool, expected: bool) -> None:
    if per_position != expected:
        has, needs = ("position", "sequence") if per_position else ("sequence", "position")
        raise ShapeMismatch(
            f"the shard of {name} has a label for every {has}; this federation expects one for every {needs}. "
            "Convert its y (one for every position has the shape of x), or start a federation of its own"
        )


def _mismatch(name: str, profile: Profile, kind: str, shape: tuple[int, ...]) -> str:
    return (
        f"the shard of {name} holds {profile.kind} of shape {profile.shape}; this federation expects {kind} of shape {shape}. "
        "Convert the shard, or start a federation of its own"
    )
