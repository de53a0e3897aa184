"""The aggregators that carry out a method on the server, made from its typed settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, Protocol, cast

from torch import nn

from attune.common.errors import SettingError
from attune.common.methods.method import SOLVED, ConfiguredMethod, PartKind, assign
from attune.common.methods.settings.aggregators import SETTINGS, HypernetworkSettings
from attune.common.models.structure import components_by_part
from attune.common.plugins import implementation_of, imported
from attune.fedserver.lab.aggregators.base import Aggregator, Vault

CLASSES = {
    "mean": "mean:Mean",
    "attention": "attention:Mcsa",
    "heur-amp": "attention:HeurAmp",
    "amp": "attention:Amp",
    "handed-in": "mixing:HandedIn",
    "hypernetwork": "hypernetwork:Hypernetwork",
    "closed-form": "closed_form:ClosedFormSums",
}


class AggregatorClass(Protocol):
    """The one signature with which every aggregator is made, a plug-in's too; fedserver.lab.aggregators.base says the rest."""

    def __call__(self, settings: Any, vault: Vault, seed: int, components: Mapping[str, list[str]]) -> Aggregator: ...


def aggregator_class(name: str, settings: Any = None) -> AggregatorClass:
    """Import the class of the aggregator that settings call `name`."""
    if isinstance(settings, HypernetworkSettings) and settings.on_device:
        return cast(AggregatorClass, imported("attune.fedserver.lab.aggregators.shared_network:SharedNetwork"))
    if name in CLASSES:
        return cast(AggregatorClass, imported(f"attune.fedserver.lab.aggregators.{CLASSES[name]}"))
    return cast(AggregatorClass, implementation_of(SETTINGS[name], name))


def made(name: str, settings: Any, vault: Vault, seed: int, components: Mapping[str, list[str]]) -> Aggregator:
    """Make the aggregator of a part that settings call `name`.

    Raises:
        SettingError: A plug-in's class takes other arguments.
    """
    kind = aggregator_class(name, settings)
    try:
        signature(kind).bind(settings, vault, seed, components)
    except TypeError as error:
        raise SettingError(
            f"the aggregator {name!r} cannot be made of (settings, vault, seed, components): {error}; update its package"
        ) from None
    return kind(settings, vault, seed, components)


def aggregators_for(
    configured: ConfiguredMethod,
    model: nn.Module,
    vault_for: Callable[[PartKind], Vault],
    seed: int,
) -> dict[PartKind, Aggregator]:
    """Return one aggregator for every part that leaves the device and has a tensor in this model.

    Raises:
        SettingError: As `assign`, for a model that does not fit the method.
    """
    method, settings = configured.method, configured.aggregators
    kinds = assign(method, model)
    result: dict[PartKind, Aggregator] = {}
    for kind, part in components_by_part(model, kinds).items():
        if kind != "private":
            result[kind] = made(method.aggregators[kind], settings[kind], vault_for(kind), seed, part)
    if SOLVED in settings:
        result[SOLVED] = made("closed-form", settings[SOLVED], vault_for(SOLVED), seed, {})
    return result
