"""Checks of the model: settings are tried at the first start, before devices come; what devices declare is limited."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from attune.common.errors import SettingError
from attune.common.models import registry
from attune.common.models.registry import size_bytes
from attune.common.plan import ModelSpec, Profile
from attune.common.task import TASKS, TIME_AND_EVENT
from attune.fedserver.core.client_privacy import with_noise
from attune.fedserver.core.conflicts import check_conflicts
from attune.fedserver.core.planning import ResolvedSettings, make_plan, roles_of
from attune.fedserver.core.scale import check_bounds

CLASSES, VOCABULARY = 2, 100  # for the trial, where the operator does not declare them


def check_declared(settings: ResolvedSettings) -> list[str]:
    """Check what the settings rule out by themselves, and build the model on trial, if the section [data] declares the samples.

    Of a model that cannot be tried it is checked that its code can be imported.

    Returns:
        What some devices will lack, a line each.

    Raises:
        SettingError: No devices could take part, or the model cannot be.
    """
    data, privacy = settings.data, settings.privacy
    if data.task is not None:
        check_conflicts(settings, data.task)
    check_bounds(privacy, data.schema)
    with_noise(privacy, settings.round)
    if (profile := _profile(settings)) is not None:
        make_plan(settings, {"a device": profile}, "", fewest=1)
    name = settings.model_name
    if name is not None and ":" in name:
        registry.load(name)
    errors = []
    for spec in _specs(settings):
        from attune.common.methods.fit import check_model

        try:
            check_model(spec, settings.configured, settings.seed, privacy, data.task or "classes")
            break
        except SettingError as error:
            errors.append(error)
    else:
        if errors:
            raise errors[0]
    return list(_lacking(settings))


def _lacking(settings: ResolvedSettings) -> Iterator[str]:
    """Yield what the operator should declare, because devices whose owners limit what they spend do not tell it."""
    data = settings.data
    if not settings.privacy.on_devices:
        return
    missing = ["data.classes"] if data.task in (None, "classes") and not data.classes else []
    missing += ["data.vocabulary"] if data.kind == "tokens" and not data.vocabulary else []
    for setting in missing:
        yield (
            f"{setting} is not set: a device with --max-epsilon or --max-delta does not tell it, and is refused unless its "
            "meta.json says it"
        )


def _profile(settings: ResolvedSettings) -> Profile | None:
    """Return what a device could declare, if the operator has declared kind, shape and outputs of the samples."""
    data, schema = settings.data, settings.data.schema
    kind, shape = ("tabular", (len(schema.feature_names),)) if schema else (data.kind, tuple(data.shape))
    if kind is None or not shape or (data.task is None and not data.classes):
        return None
    outputs = TIME_AND_EVENT if data.task == "survival" else range(max(CLASSES, len(settings.privacy.target_ranges)))
    return Profile(
        kind,
        shape,
        list(data.classes or outputs),
        1,
        0,
        data.vocabulary or (VOCABULARY if kind == "tokens" else 0),
        column_names=schema.feature_names if schema else data.names,
        task=data.task or "classes",
        schema=schema or msgspec.UNSET,
    )


def _specs(settings: ResolvedSettings) -> Iterator[ModelSpec]:
    """Yield the specs that the model may get: two for tokens, since [data] does not say whether each token has a label."""
    data = settings.data
    if data.kind is None or not data.shape:
        return
    name = settings.model_name or registry.model_for(data.kind, roles_of(settings.method))
    classes = TASKS[data.task or "classes"].width(len(data.classes) or CLASSES)
    vocabulary = (data.vocabulary or VOCABULARY) if data.kind == "tokens" else 0
    pixels = name in registry.MODELS and registry.MODELS[name].labels_pixels
    for per_position in (False, True) if data.kind == "tokens" and data.task in (None, "classes") else (pixels,):
        spec = registry.default_spec(
            data.kind, tuple(data.shape), classes, vocabulary, name, settings.model_options, per_position
        )
        yield settings.configured.spec_of(spec)


def check_size(spec: ModelSpec, most_bytes: int) -> None:
    """Check the size of the model that devices' data ask for.

    Raises:
        SettingError: It has more than `most_bytes`, or cannot be built.
    """
    size = size_bytes(spec)
    if size > most_bytes:
        raise SettingError(
            f"a {spec.name} for {spec.kind} of shape {spec.shape} with {spec.classes} classes has {size:,} bytes; at most "
            f"{most_bytes:,} are allowed (server.max_model_bytes)"
        )
