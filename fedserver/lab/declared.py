"""Checks of the model: settings are tried at the first start, before devices come; what devices declare is limited."""

from __future__ import annotations

from collections.abc import Iterator

from attune.common.errors import SettingError
from attune.common.models import registry
from attune.common.models.registry import size_bytes
from attune.common.plan import ModelSpec
from attune.common.task import TASKS
from attune.fedserver.core.planning import ResolvedSettings, roles_of
from attune.fedserver.core.survival_settings import check_task_settings

CLASSES, VOCABULARY = 2, 100  # for the trial, where the operator does not declare them


def check_declared(settings: ResolvedSettings) -> None:
    """Build the model on trial if the section [data] declares the samples; else check only that its code can be imported.

    Raises:
        SettingError: The model cannot be.
    """
    if settings.data.task is not None:
        check_task_settings(settings.data.task, settings.configured, settings.train, settings.privacy)
    name = settings.model_name
    if name is not None and ":" in name:
        registry.load(name)
    specs = list(_specs(settings))
    if not specs:
        return
    from attune.common.methods.fit import check_model

    errors = []
    for spec in specs:
        try:
            check_model(spec, settings.configured, settings.seed, settings.privacy)
            return
        except SettingError as error:
            errors.append(error)
    raise errors[0]


def _specs(settings: ResolvedSettings) -> Iterator[ModelSpec]:
    """Yield the specs that the model may get: two for tokens, since [data] does not say whether each token has a label."""
    data = settings.data
    if data.kind is None or not data.shape:
        return
    name = settings.model_name or registry.model_for(data.kind, roles_of(settings.method))
    classes = TASKS[data.task or "classes"].width(len(data.classes) or CLASSES)
    vocabulary = (data.vocabulary or VOCABULARY) if data.kind == "tokens" else 0
    for per_position in (False, True) if data.kind == "tokens" and data.task in (None, "classes") else (False,):
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
