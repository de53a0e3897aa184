"""From the operator's settings and the devices' declarations to what is fixed for everyone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from attune.common.config import RoundSettings, ServerSettings, TrainSettings, convert, merge
from attune.common.errors import HomeMismatch, SettingError
from attune.common.methods.method import EVERYDAY, ConfiguredMethod, Method, check_task
from attune.common.methods.registry import configured_from, method_from_options, packages_on_devices, returns_of
from attune.common.models import registry as models
from attune.common.plan import DataSettings, Label, Plan, Profile
from attune.fedserver.core.adaptation import AdaptationSpec, adaptation_of
from attune.fedserver.core.encodings import Encodings, encodings_of
from attune.fedserver.core.policy import Synchronous
from attune.fedserver.core.round import Rules
from attune.fedserver.core.scale import scale_of, scale_of_targets
from attune.fedserver.core.schema import columns_of

MAX_PLAN_BYTES = 2 << 20  # half of what a message may have
AFTER_THE_END = ("adapt_rounds", "adapt")


@dataclass(frozen=True)
class ResolvedSettings:
    """Every setting with its value: what was set, over the method's defaults, over the general ones."""

    configured: ConfiguredMethod  # the method with typed settings
    method_options: dict[str, Any]  # of the preset, and as set
    model_name: str | None
    model_options: dict[str, Any]
    train: TrainSettings
    round: RoundSettings
    encodings: Encodings
    server: ServerSettings
    data: DataSettings
    seed: int
    adaptation: AdaptationSpec | None  # of newcomers; None: the method has nothing of a device's own

    @property
    def method(self) -> Method:
        """The method alone."""
        return self.configured.method

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
            "method": {"name": self.method.name} | _components(self.configured),
            "model": {"name": self.model_name} | self.model_options,
            "data": msgspec.structs.asdict(self.data),
            "train": {key: value for key, value in msgspec.structs.asdict(self.train).items() if value is not msgspec.UNSET},
            "round": {key: value for key, value in msgspec.structs.asdict(self.round).items() if key not in AFTER_THE_END},
        }
        return {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()} | {
            "seed": self.seed
        }


def _components(configured: ConfiguredMethod) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for struct in (*configured.aggregators.values(), configured.objective, configured.predictor):
        values |= msgspec.structs.asdict(struct)
    return values


def resolve(overrides: Mapping[str, Any]) -> ResolvedSettings:
    """Checks all that can be checked before a device has connected. Errors: SettingError with the nearest known name."""
    given = dict(overrides.get("method", {}))
    preset = str(given.pop("preset", EVERYDAY))
    method = method_from_options(given)
    given.pop("name", None)
    full = merge(method.preset(preset, overrides.get("model", {}).get("name")), {**overrides, "method": given})
    options = dict(full["method"])
    configured = configured_from({**options, "name": method.name})
    model = dict(full.get("model", {}))
    name = model.pop("name", None)
    models.check_options(name, model)
    models.check_roles(name, roles_of(method), method.name)
    rounds = convert(RoundSettings, full.get("round", {}), "round.")
    encodings = encodings_of(rounds, method.kinds)
    encodings.check_here()
    return ResolvedSettings(
        configured=configured,
        method_options=options,
        model_name=name,
        model_options=model,
        train=convert(TrainSettings, full.get("train", {}), "train."),
        round=rounds,
        encodings=encodings,
        server=convert(ServerSettings, full.get("server", {}), "server."),
        data=convert(DataSettings, full.get("data", {}), "data."),
        seed=int(full.get("seed", 0)),
        adaptation=adaptation_of(configured, rounds.adapt),
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


def make_plan(settings: ResolvedSettings, profiles: Mapping[str, Profile], federation: str, run: str = "") -> Plan:
    """The plan for the devices present at round 1, whose data are alike. Classes are what the operator declares, or else the
    sorted union of their labels. Errors: SettingError.
    """
    ordered = [profiles[name] for name in sorted(profiles)]
    declared = settings.data
    labels: set[Label] = set(declared.classes) or {label for profile in ordered for label in profile.labels}
    classes = sorted(labels, key=lambda label: (isinstance(label, str), label))
    first = ordered[0]
    if first.task != "classes":
        check_task(settings.configured, first.task)
        classes = first.labels  # of all devices alike, in the order of y's columns
    if settings.train.augment and first.kind != "images":
        raise SettingError(f"train.augment is for images, and the devices have {first.kind}; leave it out")
    spec = models.default_spec(
        first.kind,
        first.shape,
        len(classes),
        declared.vocabulary or max(profile.vocabulary for profile in ordered),
        settings.model_name or models.model_for(first.kind, roles_of(settings.method)),
        settings.model_options,
        first.per_position,
    )
    plan = Plan(
        federation=federation,
        seed=settings.seed,
        model=spec,
        classes=classes,
        method=settings.method.name,
        method_options=settings.method_options,
        train=settings.train,
        scale=scale_of(profiles),
        column_names=declared.columns or columns_of(ordered),
        task=first.task,
        targets=scale_of_targets(profiles),
        run=run,
    )
    packages = packages_on_devices(plan.method, plan.method_options, spec.name)
    plugins = {package.name: package.version for package in packages}
    plan = msgspec.structs.replace(plan, plugins=plugins, returns=returns_of(settings.configured))
    if len(msgspec.json.encode(plan)) > MAX_PLAN_BYTES:
        most = max(profiles, key=lambda name: len(msgspec.json.encode(profiles[name].labels)))
        raise SettingError(
            f"the plan is too long to be sent: it names {len(classes)} classes (most of them from {most}). Declare data.classes"
        )
    return plan


def pinned(plan: Plan, body_digest: str) -> Plan:
    """The plan of a model whose frozen body has this digest; empty: it has no body."""
    if not body_digest:
        return plan
    return msgspec.structs.replace(plan, model=msgspec.structs.replace(plan.model, body_digest=body_digest))


def why_this_model(settings: ResolvedSettings, plan: Plan) -> str:
    """Why a model was chosen that is not the usual one for this kind of data; empty if it is, or was named."""
    lacking = models.lacking(plan.model.kind, roles_of(settings.method))
    if settings.model_name or not lacking:
        return ""
    return f"the usual model for {plan.model.kind} has no {', '.join(lacking)}, which method {plan.method} needs"


def roles_of(method: Method) -> frozenset[str]:
    """Of common.models.structure: what the method's selectors ask of the model."""
    return frozenset(selector[1:] for selector, _ in method.parts if selector.startswith("@"))
