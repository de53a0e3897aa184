"""From a method and its options to the objective and the predictor that carry it out on the device."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast

import msgspec

from attune.common.methods.method import ConfiguredMethod
from attune.common.plan import Plan
from attune.fedclient.work.objectives.base import Objective
from attune.fedclient.work.predictors.base import Predictor

OBJECTIVES = {
    "sgd": "sgd:Sgd",
    "proximal": "proximal:Proximal",
    "maml": "maml:Maml",
    "moreau": "moreau:Moreau",
    "own-model": "own_model:OwnModel",
    "alternating": "alternating:Alternating",
    "two-heads": "two_heads:TwoHeads",
    "gp": "gp:Gp",
}
PREDICTORS = {
    "model": "model:Model",
    "fine-tune": "fine_tune:FineTune",
    "knn": "knn:Knn",
    "own-model": "own_model:OwnModel",
    "two-heads": "two_heads:TwoHeads",
    "gp": "gp:Gp",
}


def objective_class(name: str) -> Callable[..., Objective]:
    """The class of the objective that settings call `name`, imported when it is asked for."""
    return cast(Callable[..., Objective], _load("objectives", OBJECTIVES[name]))


def predictor_class(name: str) -> Callable[..., Predictor]:
    """The class of the predictor that settings call `name`, imported when it is asked for."""
    return cast(Callable[..., Predictor], _load("predictors", PREDICTORS[name]))


def objective_for(configured: ConfiguredMethod) -> Objective:
    """Return the method's objective with its settings."""
    return objective_class(configured.method.objective)(configured.objective)


def predictor_for(configured: ConfiguredMethod) -> Predictor:
    """Return the method's predictor with its settings."""
    return predictor_class(configured.method.predictor)(configured.predictor)


def family_of(plan: Plan) -> bytes:
    """Equal for devices that compute alike but for their tensors, samples and seeds."""
    return msgspec.json.encode(plan)


def _load(folder: str, path: str) -> object:
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(f"attune.fedclient.work.{folder}.{module}"), attribute)
