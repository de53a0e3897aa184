"""Parts of a learner: the objective and the predictor of a method, from its typed settings, and samples on a processor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import msgspec
import torch

from attune.common.methods.method import ConfiguredMethod
from attune.common.methods.settings.objectives import OBJECTIVES as OBJECTIVE_SETTINGS
from attune.common.methods.settings.objectives import PREDICTORS as PREDICTOR_SETTINGS
from attune.common.plan import Plan
from attune.common.plugins import implementation_of, imported
from attune.fedclient.data.prepare import Prepared
from attune.fedclient.work.objectives.base import Objective
from attune.fedclient.work.predictors.base import Predictor

OBJECTIVES = {
    "sgd": "objectives.descent:Sgd",
    "proximal": "objectives.proximal:Proximal",
    "maml": "objectives.descent:Maml",
    "moreau": "objectives.proximal:Moreau",
    "own-model": "objectives.proximal:OwnModel",
    "mean-regularised": "objectives.proximal:MeanRegularised",
    "mixture": "objectives.mixed_models:Mixture",
    "local-aggregation": "objectives.mixed_models:LocalAggregation",
    "domain-bias": "objectives.two_heads:DomainBias",
    "frozen-private": "objectives.descent:FrozenPrivate",
    "alternating": "objectives.descent:Alternating",
    "two-heads": "objectives.two_heads:TwoHeads",
    "sums": "objectives.sums:SampleSums",
}
PREDICTORS = {
    "model": "predictors.base:PlainPredictor",
    "fine-tune": "predictors.base:FineTune",
    "knn": "predictors.knn:Knn",
    "own-model": "predictors.base:OwnModelPredictor",
    "two-heads": "predictors.base:TwoHeadsPredictor",
    "domain-bias": "predictors.base:DomainBiasPredictor",
    "closed-form": "predictors.closed_form:ClosedFormPredictor",
}


def objective_class(name: str) -> Callable[..., Objective]:
    """Import the class of the objective that settings call `name`."""
    return cast(Callable[..., Objective], _class_of(name, OBJECTIVES, OBJECTIVE_SETTINGS))


def predictor_class(name: str) -> Callable[..., Predictor]:
    """Import the class of the predictor that settings call `name`."""
    return cast(Callable[..., Predictor], _class_of(name, PREDICTORS, PREDICTOR_SETTINGS))


def objective_for(configured: ConfiguredMethod) -> Objective:
    """Return the method's objective with its settings."""
    return objective_class(configured.method.objective)(configured.objective)


def predictor_for(configured: ConfiguredMethod) -> Predictor:
    """Return the method's predictor with its settings."""
    return predictor_class(configured.method.predictor)(configured.predictor)


def family_of(plan: Plan) -> bytes:
    """Return a key that is equal for devices whose work differs only in tensors, samples and seeds."""
    return msgspec.json.encode(plan)


def on_processor(data: Prepared, device: torch.device) -> Prepared:
    """Return the samples on the processor if they fit; else they stay in memory and move batch by batch."""
    if device.type == "cpu":
        return data
    try:
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in vars(data).items() if isinstance(value, torch.Tensor)
        }
        return replace(data, **moved)
    except torch.OutOfMemoryError:
        return data


def _class_of(name: str, built_in: Mapping[str, str], settings: Mapping[str, type]) -> object:
    return imported(f"attune.fedclient.work.{built_in[name]}") if name in built_in else implementation_of(settings[name], name)
