"""Methods by name: the built-in rows, and those of other packages. None of them imports torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from attune.common.config import AUTO
from attune.common.errors import SettingError
from attune.common.exchange.registry import packages_of
from attune.common.methods.method import SOLVED, ConfiguredMethod, Method, configure, custom_method
from attune.common.methods.rows import ROWS
from attune.common.methods.settings.aggregators import SETTINGS as AGGREGATORS
from attune.common.methods.settings.aggregators import ClosedFormSettings, Returns
from attune.common.methods.settings.objectives import OBJECTIVES, PREDICTORS
from attune.common.models.registry import MODELS
from attune.common.plan import Plan
from attune.common.plugins import Package, PluginRegistry, check_installed

DEFAULT, CUSTOM = "fedtp", "custom"
_ON_SERVER, _ON_DEVICE = "on_server", "on_device"  # where a plan keeps its method with typed settings, as each side sees it
METHODS: PluginRegistry[Method] = PluginRegistry("methods", Method, {method.name: method for method in ROWS})


def names() -> list[str]:
    """Return the names of all methods that are known here, sorted."""
    return sorted(METHODS)


def get(name: str) -> Method:
    """Return the method of that name.

    Raises:
        SettingError: For an unknown name, with the nearest known one.
    """
    method = METHODS.require(name, "method")
    if method.name != name:
        raise SettingError(f"the method {name!r} calls itself {method.name!r}: give both the same name")
    return method


def method_from_options(options: Mapping[str, Any], aggregators_elsewhere: bool = False) -> Method:
    """Return the method that a [method] table names, or describes when its name is "custom".

    Args:
        options: The table.
        aggregators_elsewhere: Accept an unknown name of an aggregator, because another machine runs it.

    Raises:
        SettingError: For an unknown name, or a description that is not one.
    """
    name = options.get("name", DEFAULT)
    if name == AUTO:
        raise SettingError(
            "a race of methods (auto) begins with a federation: start `fedserver --method auto` on a new home, or name one"
        )
    return custom_method(options, aggregators_elsewhere) if name == CUSTOM else get(name)


def configured_from(options: Mapping[str, Any], returns: Mapping[str, Returns] | None = None) -> ConfiguredMethod:
    """Return the method of a [method] table with its typed settings. This is the one place where they are parsed.

    Args:
        options: The table.
        returns: Same as for `configure`.

    Raises:
        SettingError: As `method_from_options` and `configure`.
    """
    return configure(method_from_options(options, returns is not None), options, returns)


def configured_in(plan: Plan) -> ConfiguredMethod:
    """Return the method that a plan has fixed with its typed settings, as the server needs them.

    They are parsed once and kept beside the plan's fields.

    Raises:
        SettingError: If this installation does not know the method or one of its settings, or lacks a plug-in of the plan.
    """
    return _kept(plan, _ON_SERVER, None)


def configured_on_device(plan: Plan) -> ConfiguredMethod:
    """Return the method that a plan has fixed as a device needs it, which never loads a plug-in aggregator.

    Raises:
        SettingError: As `configured_in`.
    """
    return _kept(plan, _ON_DEVICE, plan.returns)


def packages_on_devices(
    method: str, method_options: Mapping[str, Any], model: str, transforms: Iterable[str] = ()
) -> Iterator[Package]:
    """Yield the packages whose code devices run: of the model, the method's row, its objective and predictor, the transforms.

    A package is yielded before any code of it is loaded, so that the caller can refuse it by not going on.

    Args:
        method: The method's name.
        method_options: The rest of the [method] table.
        model: The model's name.
        transforms: The names of the transforms that devices run.

    Raises:
        SettingError: As `method_from_options`.
    """
    yield from packages_of(transforms)
    yield from filter(None, (MODELS.package_of(model), METHODS.package_of(method) if method != CUSTOM else None))
    row = method_from_options({**method_options, "name": method}, aggregators_elsewhere=True)
    yield from filter(None, (OBJECTIVES.package_of(row.objective), PREDICTORS.package_of(row.predictor)))


def returns_of(configured: ConfiguredMethod) -> dict[str, Returns]:
    """Return what devices hand in of each part whose aggregator is not built in, which devices need not have."""
    chosen = {kind: configured.method.aggregators[kind] for kind in configured.aggregators}
    return {kind: configured.aggregators[kind].returns for kind, name in chosen.items() if name not in AGGREGATORS.built_in}


def _kept(plan: Plan, side: str, returns: Mapping[str, Returns] | None) -> ConfiguredMethod:
    kept = vars(plan)  # beside the plan's fields: neither compared nor encoded
    if side not in kept:
        check_installed(plan.plugins)
        configured = configured_from({**plan.method_options, "name": plan.method}, returns)
        if plan.closed_form:
            aggregators = {**configured.aggregators, SOLVED: ClosedFormSettings()}
            configured = dataclasses.replace(configured, aggregators=aggregators)
        kept[side] = configured
    return cast(ConfiguredMethod, kept[side])
