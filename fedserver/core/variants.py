"""Variants of a model ([[model.variant]]): other sizes or kinds of it in one federation. A device's owner chooses one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from attune.common.errors import SettingError
from attune.common.models import registry
from attune.common.models.options import SHARPNESS
from attune.common.plan import LIGHT, MAIN, ModelSpec, Profile
from attune.common.schema import Schema
from attune.common.task import TASKS

if TYPE_CHECKING:
    from attune.fedserver.core.planning import ResolvedSettings

MOST = 16  # of a plan: each has a state of its own on the server
_NAME = re.compile("[a-z0-9][a-z0-9_-]{0,39}")


class ModelChoice(msgspec.Struct, frozen=True):
    """Settings of one variant: the model's name (None: by the data's kind) and its options."""

    name: str | None
    options: dict[str, Any]


def variants_of(
    given: Any, name: str | None, options: Mapping[str, Any], check: Callable[[str | None], None]
) -> dict[str, ModelChoice]:
    """Return the variants that settings name, by their names. What a variant does not set is as in [model].

    Args:
        given: The value of model.variant: a list of tables.
        name: The name of the plan's model.
        options: The options of the plan's model, which a variant with another `model` does not take over.
        check: Checks that the method can use a model.

    Raises:
        SettingError: A variant has no good name, or its model or an option is wrong.
    """
    if not isinstance(given, list) or not all(isinstance(table, Mapping) for table in given):
        raise SettingError("setting model.variant is a list of tables: write [[model.variant]], and a name in each")
    if len(given) > MOST:
        raise SettingError(f"setting model.variant has {len(given)} variants; at most {MOST} are possible")
    variants: dict[str, ModelChoice] = {}
    for table in given:
        changes = dict(table)
        variant, other = changes.pop("name", None), changes.pop("model", name)
        if not isinstance(variant, str) or not _NAME.fullmatch(variant) or variant in (MAIN, LIGHT, *variants):
            raise SettingError(
                f"setting model.variant: {str(variant)[:50]!r} is no name of a variant: take up to 40 small letters, digits, - "
                f"and _, for each another one, and not {MAIN!r}"
            )
        chosen = ModelChoice(other, changes if other != name else {**options, **changes})
        try:
            registry.check_options(chosen.name, chosen.options)
            check(chosen.name)
        except SettingError as error:
            raise SettingError(f"variant {variant} of the model: {error}") from None
        variants[variant] = chosen
    return variants


def specs_of(
    settings: ResolvedSettings,
    profiles: Sequence[Profile],
    classes: int,
    schema: Schema | None,
    roles: frozenset[str],
    one_sum: bool,
) -> dict[str, ModelSpec]:
    """Return the specs of the plan's model, under an empty name, and of its variants.

    Args:
        settings: The settings of the run.
        profiles: Description of each device's data, all of one form.
        classes: The number of classes.
        schema: The schema of a table.
        roles: The roles that the model's tensors must have.
        one_sum: Whether sums over samples become one sum of many devices.

    Raises:
        SettingError: A model does not take these data.
    """
    first, vocabulary = profiles[0], settings.data.vocabulary or max(profile.vocabulary for profile in profiles)
    width, specs = TASKS[first.task].width(classes), dict[str, ModelSpec]()
    for variant, choice in {"": ModelChoice(settings.model_name, settings.model_options), **settings.variants}.items():
        name = choice.name or registry.model_for(first.kind, roles, choice.options, first.per_position)
        spec = registry.default_spec(first.kind, first.shape, width, vocabulary, name, choice.options, first.per_position)
        if spec.name == "closed-form":
            spec = msgspec.structs.replace(spec, options={**spec.options, "one_sum": one_sum})
        closed = spec.name == "closed-form" or (settings.method.predictor == "closed-form" and ":" in spec.name)
        if closed and spec.options.get("sharpness") is None and first.task != "regression":
            spec = msgspec.structs.replace(spec, options={**spec.options, "sharpness": SHARPNESS})
        if schema is not None and schema.embedded:
            spec = msgspec.structs.replace(spec, embedded=schema.embedded)
        if settings.data.fit:
            spec = msgspec.structs.replace(spec, channels=settings.data.channels)
        specs[variant] = settings.configured.spec_of(spec)
    return specs
