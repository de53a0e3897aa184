"""From a method and its options to the objects that carry it out."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import nn

from common.aggregators.base import Aggregator, Vault
from common.aggregators.settings import CLASSES as AGGREGATORS
from common.methods.algebra import Method, PartKind, assign, options_of
from common.models.structure import components
from common.objectives.base import Objective
from common.objectives.settings import CLASSES as OBJECTIVES
from common.predictors.base import Predictor
from common.predictors.settings import CLASSES as PREDICTORS


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
        kind: cast(Aggregator, _load(AGGREGATORS[method.aggregators[kind]])(settings[kind], vault_for(kind), seed, part))
        for kind, part in parts.items()
        if kind != "private"
    }


def objective_for(method: Method, options: Mapping[str, Any]) -> Objective:
    """The objective with its settings. Errors: SettingError."""
    return cast(Objective, _load(OBJECTIVES[method.objective])(options_of(method, options).objective))


def predictor_for(method: Method, options: Mapping[str, Any]) -> Predictor:
    """The predictor with its settings. Errors: SettingError."""
    return cast(Predictor, _load(PREDICTORS[method.predictor])(options_of(method, options).predictor))


def _load(path: str) -> Callable[..., object]:
    module, _, attribute = path.partition(":")
    loaded: Callable[..., object] = getattr(importlib.import_module(module), attribute)
    return loaded
