"""Model code that was handed over as an object: under a name by which the model registry finds it in this process alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import nn

from attune.common.errors import SettingError
from attune.common.plan import ModelSpec

Factory = Callable[[ModelSpec], nn.Module]
_HERE: dict[str, Factory] = {}


def __getattr__(name: str) -> Factory:
    """What the registry asks this module for."""
    if name in _HERE:
        return _HERE[name]
    raise AttributeError(f"{name} was handed to a simulation of another process: it cannot be found by name")


def name_of(model: str | Factory | nn.Module, durable: bool, spread: bool = False) -> str:
    """The name that settings and plan give to this model.

    A module is copied for every use, with the weights that it has now. durable: the name must hold in a later process too;
    spread: in a process beside this one, which knows nothing of this one's script. Errors: SettingError.
    """
    if isinstance(model, str):
        return model
    if not isinstance(model, nn.Module) and _importable(model) and not (spread and model.__module__ == "__main__"):
        return f"{model.__module__}:{model.__qualname__}"
    if durable or spread:
        given = "with a home" if durable else "for devices in other processes"
        raise SettingError(f"{given}, the model must be a name or a function at the top of a module: it is found by its name")
    if not callable(model):
        raise SettingError(f"model is a {type(model).__name__}; give a name, a function of a ModelSpec, or a torch module")
    name = f"{type(model).__name__ if isinstance(model, nn.Module) else 'factory'}_{len(_HERE) + 1}"
    _HERE[name] = _copies(model) if isinstance(model, nn.Module) else model
    return f"{__name__}:{name}"


def _copies(module: nn.Module) -> Factory:
    kept = copy.deepcopy(module)
    return lambda spec: copy.deepcopy(kept)


def _importable(factory: Any) -> bool:
    try:
        return getattr(import_module(factory.__module__), factory.__qualname__) is factory
    except (AttributeError, ImportError, ValueError):
        return False
