"""Models that were given as objects. Each gets a name by which the model registry finds it, in this process only."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import nn

from attune.common.errors import SettingError
from attune.common.plan import ModelSpec

Factory = Callable[[ModelSpec], nn.Module]
_MODELS: dict[str, Factory] = {}


def __getattr__(name: str) -> Factory:
    """Return the model of this name, for the registry, which looks it up as an attribute of this module."""
    if name in _MODELS:
        return _MODELS[name]
    raise AttributeError(f"{name} was given to a simulation in another process, so it cannot be found by name here")


def model_name(model: str | Factory | nn.Module, durable: bool, spread: bool = False) -> str:
    """Return the name of a model for settings and plan.

    Args:
        model: A name, a function of a ModelSpec, or a module, which is copied for every use with its present weights.
        durable: Whether a later process must find the model by this name.
        spread: Whether other processes must find it now. They do not see the main script of this process.

    Raises:
        SettingError: The model cannot be found by name where it must be, or is none of the three.
    """
    if isinstance(model, str):
        return model
    if not isinstance(model, nn.Module) and _importable(model) and not (spread and model.__module__ == "__main__"):
        return f"{model.__module__}:{model.__qualname__}"
    if durable or spread:
        given = "with a home" if durable else "for devices in other processes"
        raise SettingError(f"{given}, the model must be a name or a function at the top of a module, to be found by its name")
    if not callable(model):
        raise SettingError(f"model is a {type(model).__name__}; give a name, a function of a ModelSpec, or a torch module")
    name = f"{type(model).__name__ if isinstance(model, nn.Module) else 'factory'}_{len(_MODELS) + 1}"
    _MODELS[name] = _copies(model) if isinstance(model, nn.Module) else model
    return f"{__name__}:{name}"


def _copies(module: nn.Module) -> Factory:
    kept = copy.deepcopy(module)
    return lambda spec: copy.deepcopy(kept)


def _importable(factory: Any) -> bool:
    try:
        return getattr(import_module(factory.__module__), factory.__qualname__) is factory
    except (AttributeError, ImportError, ValueError):
        return False
