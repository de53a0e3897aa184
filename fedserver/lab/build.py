"""From a method and its options to the aggregators that carry it out."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import nn

from attune.common.methods.method import Method, PartKind, assign, options_of
from attune.common.models.structure import components
from attune.fedserver.lab.aggregators.base import Aggregator, Vault

CLASSES = {
    "mean": "mean:Mean",
    "attention": "attention:Attention",
    "heur-amp": "similarity:HeurAmp",
    "amp": "similarity:Amp",
    "hypernetwork": "hypernetwork:Hypernetwork",
}


def aggregator_class(name: str) -> Callable[..., Aggregator]:
    """The class of the aggregator that settings call `name`, imported when it is asked for."""
    module, _, attribute = CLASSES[name].partition(":")
    found = getattr(importlib.import_module(f"attune.fedserver.lab.aggregators.{module}"), attribute)
    return cast(Callable[..., Aggregator], found)


def aggregators_for(
    method: Method, options: Mapping[str, Any], model: nn.Module, vault_for: Callable[[PartKind], Vault], seed: int
) -> dict[PartKind, Aggregator]:
    """One aggregator for every part that leaves the device and has a tensor in this model. Errors: SettingError."""
    settings = options_of(method, options).aggregators
    kinds = assign(method, model)
    parts: dict[PartKind, dict[str, list[str]]] = {}
    for component, names in components(model).items():
        for name in names:
            parts.setdefault(kinds[name], {}).setdefault(component, []).append(name)
    return {
        kind: aggregator_class(method.aggregators[kind])(settings[kind], vault_for(kind), seed, part)
        for kind, part in parts.items()
        if kind != "private"
    }
