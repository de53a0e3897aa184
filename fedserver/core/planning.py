"""Settings of a run with all defaults, and the plan that is fixed for all devices at round 1."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from attune.common.config import EVERYDAY, PrivacySettings, RoundSettings, ServerSettings, TrainSettings, convert, merge
from attune.common.errors import HomeMismatch, SettingError
from attune.common.exchange.registry import SECURE_SUM, settings_of
from attune.common.methods.method import ConfiguredMethod, Method
from attune.common.methods.private_training import with_orders
from attune.common.methods.registry import configured_from, method_from_options, packages_on_devices, returns_of
from attune.common.methods.settings.aggregators import ClippedSettings
from attune.common.models import registry as models
from attune.common.plan import FEWEST_DEVICES, DataSettings, Plan, Profile, closed_form_words, score_words, standardisation
from attune.common.plugins import own_measure
from attune.common.protocol import IN_NO_SUM, SUMS
from attune.common.schema import Schema
from attune.common.task import TASKS
from attune.fedserver.core import scale as scales
from attune.fedserver.core.adaptation import AdaptationSpec, adaptation_of, device_defaults
from attune.fedserver.core.ballot import check_training, score_of, united_classes
from attune.fedserver.core.blended_sums import with_closed_form
from attune.fedserver.core.buffered_rounds import BufferedRounds, ReplayedRounds
from attune.fedserver.core.client_privacy import (
    PoissonRounds,
    check_public,
    drawn_rate,
    expected_devices,
    with_noise,
)
from attune.fedserver.core.conflicts import check_conflicts
from attune.fedserver.core.data_form import columns_of
from attune.fedserver.core.orderbook import Encodings, encodings_of
from attune.fedserver.core.phases import Rules
from attune.fedserver.core.policy import SUSPECTED, Synchronous, heard_as, outvoted
from attune.fedserver.core.records import Arrival
from attune.fedserver.core.secure_policy import ON, SameCohortRounds, defaults_of, no_sums, transform_of, weighted
from attune.fedserver.core.training_length import round_settings, usual_epochs, with_scores
from attune.fedserver.core.variants import ModelChoice, specs_of, variants_of

MAX_PLAN_BYTES = 2 << 20  # half of what a message may have
CHANGEABLE = ("adapt_rounds", "adapt", "left_out")
SHOWN, LONGEST_VALUE = 5, 60  # differences in an error, and characters of a value


@dataclass(frozen=True)
class ResolvedSettings:
    """All settings with their values: those given, else the method's defaults, else the general ones."""

    configured: ConfiguredMethod  # the method with typed settings
    method_options: dict[str, Any]  # from the preset and as given
    model_name: str | None
    model_options: dict[str, Any]
    train: TrainSettings
    round: RoundSettings
    encodings: Encodings
    server: ServerSettings
    privacy: PrivacySettings
    data: DataSettings
    seed: int
    transforms: dict[str, dict[str, Any]]  # name -> settings
    adaptation: AdaptationSpec | None  # how newcomers are fitted; None: the method has nothing personal to fit
    preset: str = EVERYDAY
    sets_epochs: bool = True  # else the devices' samples decide, when the plan is made
    until: int | None = None  # of one process, not of the run: no round opens after this one
    arrivals: Sequence[Arrival] | None = None  # of one process: buffered rounds repeat an earlier run
    variants: Mapping[str, ModelChoice] = field(default_factory=dict)  # of the model

    @property
    def method(self) -> Method:
        """The method alone."""
        return self.configured.method

    @property
    def rules(self) -> Rules:
        """The rules of the round. Newcomers get no rounds if the method has nothing that they could fit."""
        settings = self.round if self.adaptation else msgspec.structs.replace(self.round, adapt_rounds=0)
        common = self.adaptation is not None and self.adaptation.common
        privacy = self.privacy
        if not privacy.on_server:
            scored = self.train.scored_rounds
            if self.arrivals is not None:
                replayed = ReplayedRounds(settings, self.seed, score_after=scored, until=self.until, arrivals=self.arrivals)
                return Rules(settings, replayed, common)
            kind = BufferedRounds if settings.mode == "buffered" else Synchronous
            kind, secure = SameCohortRounds if privacy.same_cohort else kind, privacy.secure_aggregation
            return Rules(
                settings,
                kind(settings, self.seed, score_after=scored, until=self.until, secure=secure),
                common,
            )
        most = settings.rounds if privacy.epsilon is not None else 0
        poisson = PoissonRounds(settings, self.seed, drawn_rate(privacy, settings), most, privacy.insecure_seed)
        return Rules(settings, poisson, noisy=True)

    def what_liars_can(self, devices: int) -> list[str]:
        """Return a warning for each way in which a fifth of so many devices could decide what others are served."""
        drawn = (bool(self.round.clients) or self.round.mode == "buffered") and not self.privacy.on_server
        captured = outvoted(self.round, devices, SUSPECTED) if drawn else ""
        said = [captured and f"{captured} (round.attackers refuses such cohorts)", heard_as(devices, self.shared_bound)]
        return [line for line in said if line]

    @property
    def shared_bound(self) -> float:
        """The largest bound on a change of values that devices share, in usual changes; 0: none. A vote has no such bound."""
        shared = [one for one in self.configured.aggregators.values() if isinstance(one, ClippedSettings)]
        return max((1.0 if one.no_vote else one.bound for one in shared), default=0.0)

    def fixed(self) -> dict[str, Any]:
        """Return the settings that a home is bound to, by their dotted names.

        The server section may change at a restart, and so may the rounds for newcomers, and who is left out.
        """
        preset = {} if self.preset == EVERYDAY else {"preset": self.preset}
        sections = {
            "method": {"name": self.method.name, **preset} | _components(self.configured),
            "model": {"name": self.model_name} | self.model_options,
            "data": msgspec.structs.asdict(self.data),
            "train": {key: value for key, value in msgspec.structs.asdict(self.train).items() if value is not msgspec.UNSET},
            "round": {key: value for key, value in msgspec.structs.asdict(self.round).items() if key not in CHANGEABLE},
            "privacy": msgspec.structs.asdict(self.privacy),
        }
        if self.variants:
            sections["model"]["variant"] = dict(self.variants)
        if not self.sets_epochs:
            sections["train"]["local_epochs"] = "by samples"
        sections |= {f"transforms.{name}": {"in force": True, **values} for name, values in self.transforms.items()}
        return {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()} | {
            "seed": self.seed
        }


def turned_off(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the everyday values of the settings that another preset has changed, by their dotted names."""
    now = resolve(overrides).fixed()
    usual = resolve(merge(overrides, {"method": {"preset": EVERYDAY}})).fixed()
    return {key: usual[key] for key in sorted(usual) if usual[key] != now.get(key)}


def _components(configured: ConfiguredMethod) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for struct in (*configured.aggregators.values(), configured.objective, configured.predictor):
        values |= msgspec.structs.asdict(struct)
    return values


def resolve(overrides: Mapping[str, Any]) -> ResolvedSettings:
    """Resolve and check the settings, as far as that is possible before a device has connected.

    Raises:
        SettingError: A setting is wrong; the error suggests the nearest known name.
    """
    given = dict(overrides.get("method", {}))
    preset = str(given.pop("preset", EVERYDAY))
    method = method_from_options(given)
    given.pop("name", None)
    privacy = convert(PrivacySettings, overrides.get("privacy", {}), "privacy.")
    usual = merge(method.preset(preset, overrides.get("model", {}).get("name")), defaults_of(privacy, method))
    usual = merge(usual, device_defaults(merge(usual.get("method", {}), given)))
    full = merge(usual, {**overrides, "method": given})
    options = dict(full["method"])
    configured = configured_from({**options, "name": method.name})
    model = dict(full.get("model", {}))
    name = model.pop("name", None)
    others = model.pop("variant", [])
    models.check_options(name, model)
    check_model = partial(models.check_roles, roles=roles_of(method), method=method.name)
    check_model(name)
    rounds = round_settings(full.get("round", {}))
    if SECURE_SUM in full.get("transforms", {}):
        raise SettingError(f"transforms.{SECURE_SUM} is set by {ON}; set that one")
    transforms = {**full.get("transforms", {}), **transform_of(privacy, configured)}
    encodings = encodings_of(rounds, method.kinds, settings_of(transforms))
    encodings.check_here()
    resolved = ResolvedSettings(
        configured=configured,
        method_options=options,
        model_name=name,
        model_options=model,
        variants=variants_of(others, name, model, check_model),
        train=(train := with_scores(convert(TrainSettings, full.get("train", {}), "train."), rounds)),
        round=rounds,
        encodings=encodings,
        server=convert(ServerSettings, full.get("server", {}), "server."),
        privacy=privacy,
        data=convert(DataSettings, full.get("data", {}), "data."),
        seed=int(full.get("seed", 0)),
        transforms=transforms,
        adaptation=adaptation_of(configured, rounds.adapt),
        preset=preset,
        # Each step costs a share of a privacy budget, so there only the operator asks for more.
        sets_epochs=privacy.unit != "none" or "local_epochs" in full.get("train", {}) or train.local_steps > 0,
    )
    check_conflicts(resolved)
    return resolved


def reconcile(recorded: Mapping[str, Any] | None, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the settings of this start over those with which the home was made.

    Raises:
        HomeMismatch: They contradict the home's; the error names every difference.
    """
    if recorded is None:
        return dict(overrides)
    merged = merge(recorded, overrides)
    before = resolve(recorded).fixed()
    named = overrides.get("method", {}).get("name", before["method.name"])
    # With another method, the recorded settings may be unknown. Only the change of method is reported then.
    now = resolve(merged).fixed() if named == before["method.name"] else before | {"method.name": named}
    differing = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    if differing:
        changes = [line for key in differing for line in _changes(key, before.get(key), now.get(key))]
        more = f"; and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
        raise HomeMismatch(
            f"this home belongs to a federation with other settings: {'; '.join(changes[:SHOWN])}{more}. Leave them out to go "
            "on. To begin a run with them and the enrolled devices: `fedserver run new NAME --config FILE`. Or use a new --home"
        )
    return merged


def _changes(key: str, here: Any, now: Any) -> Iterator[str]:
    """Yield a line for each place where two values of a setting differ: each field of a table, each item of a list."""
    here, now = (msgspec.to_builtins(value) for value in (here, now))
    if isinstance(here, dict) and isinstance(now, dict):
        for name in sorted(here.keys() | now.keys()):
            if here.get(name) != now.get(name):
                yield from _changes(f"{key}.{name}", here.get(name), now.get(name))
    elif isinstance(here, list) and isinstance(now, list) and sorted(map(repr, here)) != sorted(map(repr, now)):
        only, others = ([value for value in one if value not in other] for one, other in ((here, now), (now, here)))
        yield " and ".join(
            words
            for values, words in ((only, f"{key} has {_short(only)} here"), (others, f"{key} lacks {_short(others)} here"))
            if values
        )
    else:
        yield f"{key} is {_short(here)} here, not {_short(now)}"


def _short(value: Any) -> str:
    text = "not set" if value is None else repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."


def sums_ability(settings: ResolvedSettings) -> str:
    """Return what devices can do that hand in sums over their samples with their updates."""
    return IN_NO_SUM if settings.privacy.secure_aggregation else SUMS


def check_one_sum(plan: Plan | None, transforms: Mapping[str, Any]) -> None:
    """Check that a run after this plan's asks for no second sum over samples.

    Raises:
        SettingError: It does.
    """
    had_one = plan is not None and (plan.transforms.get(SECURE_SUM, {}).get("exact") or (plan.closed_form and plan.one_sum))
    if had_one and transforms.get(SECURE_SUM, {}).get("exact"):
        raise SettingError(
            "behind masks a device hands in to one sum over its samples in the life of its home, and nothing is taken out of "
            "it: method analytic gets no other. Revoke a device that is to be forgotten (fedserver revoke), and begin a "
            "new federation, with new homes of the others"
        )


def make_plan(
    settings: ResolvedSettings,
    profiles: Mapping[str, Profile],
    federation: str,
    run: str = "",
    fewest: int = FEWEST_DEVICES,
    masked: scales.Scales = scales.Scales(),  # noqa: B008 - it is immutable
    sums: Collection[str] = (),
) -> Plan:
    """Make the plan for the devices present at round 1, whose data have one form.

    `sums` are the devices that hand in sums over their samples.

    The classes are those that the operator declares, else the sorted union of the devices' labels. Statistics become common
    scales only where `fewest` devices disclose them, or all, or where they are in a masked sum.

    Raises:
        SettingError: The settings do not fit the devices' data, classes look alike, or the plan is too long.
    """
    ordered = [profiles[name] for name in sorted(profiles)]
    declared, privacy, first = settings.data, with_noise(settings.privacy, settings.round), ordered[0]
    check_public(privacy, declared, first)
    likely = first.task != "custom" or hasattr(own_measure(settings.model_name or "none"), "likelihood")
    check_conflicts(settings, first.task, likely)
    # In other tasks the same on all devices, in the order of the columns of y.
    classes = united_classes(profiles, declared.classes) if first.task == "classes" else first.labels
    check_training(settings.train, first)
    schema = first.schema if isinstance(first.schema, Schema) else None
    scales.check_bounds(privacy, schema)
    roles, one_sum = roles_of(settings.method, privacy), settings.privacy.secure_aggregation
    specs = specs_of(settings, ordered, len(classes), schema, roles, one_sum)
    clear = scales.scales_of(profiles, fewest)
    common = scales.Scales(masked.features or clear.features, masked.targets or clear.targets)
    if privacy.unit != "none":
        common = scales.declared_scales(privacy, first)
    plan = Plan(
        federation=federation,
        seed=settings.seed,
        model=specs.pop(""),
        variants=specs,
        classes=classes,
        method=settings.method.name,
        method_options=settings.method_options,
        train=_train_of(settings, likely and TASKS[first.task].by_sample, ordered),
        scale=common.features,
        column_names=declared.names or columns_of(profiles),
        task=first.task,
        targets=common.targets,
        run=run,
        transforms=settings.transforms,
        device_transforms=settings.encodings.on_devices,
        privacy=with_orders(privacy, settings.round.rounds) if privacy != PrivacySettings() else None,
        expected_devices=expected_devices(privacy, settings.round) if privacy.on_server else 0,
        schema=schema,
        schema_digest="" if schema is None else schema.digest,
        portfolio=True,
        **score_of(settings.train, classes, ordered),
    )
    plugins = {
        package.name: package.version
        for spec in (plan.model, *plan.variants.values())
        for package in packages_on_devices(plan.method, plan.method_options, spec.name, settings.encodings.on_devices)
    }
    returns = returns_of(settings.configured)
    if settings.round.mode == "buffered" and "shared" in settings.configured.aggregators:
        returns["shared"] = "change"  # the state may have moved on when it arrives
    plan = weighted(msgspec.structs.replace(plan, plugins=plugins, returns=returns), profiles)
    if settings.round.analytic == "auto" and not settings.configured.objective.adds_up:
        buffered = "buffered rounds have none" if settings.round.mode == "buffered" else ""
        plan = with_closed_form(plan, profiles, sums, no_sums(settings.privacy, profiles, sums) or buffered)
    if schema is not None and len(schema.to_json()) > MAX_PLAN_BYTES // 2:
        raise SettingError(
            f"the plan is too long to be sent: its schema has {len(schema.columns)} columns, and categories with many values. "
            "Declare data.columns, and leave some out"
        )
    if len(msgspec.json.encode(plan)) > MAX_PLAN_BYTES:
        most = max(profiles, key=lambda name: len(msgspec.json.encode(profiles[name].labels)))
        raise SettingError(
            f"the plan is too long to be sent: it names {len(classes)} classes (most of them from {most}). Declare data.classes"
        )
    return plan


def _train_of(settings: ResolvedSettings, likely: bool, profiles: Sequence[Profile]) -> TrainSettings:
    """Return the settings of training as the plan has them, with the number of epochs.

    Where samples have no likelihood, by which devices choose between models, none is held out.
    """
    train = settings.train
    validation = train.validation if likely else 0.0
    epochs = train.local_epochs if settings.sets_epochs else usual_epochs(train, (profile.samples for profile in profiles))
    return msgspec.structs.replace(train, validation=validation, local_epochs=epochs, score=msgspec.UNSET)


def pinned(plan: Plan, body_digest: str) -> Plan:
    """Return the plan with the digest of the model's frozen body; empty: the model has none."""
    if not body_digest:
        return plan
    return msgspec.structs.replace(plan, model=msgspec.structs.replace(plan.model, body_digest=body_digest))


def notes_on(plan: Plan, settings: ResolvedSettings) -> list[str]:
    """Return what the operator is told of a new plan: its scales, closed form and score, and why it has this model."""
    lines = (standardisation(plan), closed_form_words(plan), score_words(plan), why_this_model(settings, plan))
    return list(filter(None, lines))


def why_this_model(settings: ResolvedSettings, plan: Plan) -> str:
    """Explain why the model is not the usual one for this kind of data; empty if it is, or if it was set."""
    needs = roles_of(settings.method, settings.privacy)
    why = models.why_not_usual(plan.model.kind, needs, plan.method, settings.model_options, plan.model.per_position)
    return f"a {plan.model.name}, because {why}" if why and not settings.model_name else ""


def roles_of(method: Method, privacy: PrivacySettings | None = None) -> frozenset[str]:
    """Return the roles (common.models.structure) that the method's selectors need in a model.

    BatchNorm counts batches, which cannot be generated, and its statistics are not private. LayerNorm is in encoders alone.
    """
    needs = frozenset(selector[1:] for selector, _ in method.parts if selector.startswith("@"))
    plain = "norm" in needs and ((privacy is not None and privacy.on_devices) or ("@norm", "generated") in method.parts)
    return needs | {"encoder"} if plain else needs
