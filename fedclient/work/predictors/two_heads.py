"""The sum of the generic and the personal head's logits (FedRoD)."""

from __future__ import annotations

from attune.common.methods.settings.predictors import TwoHeadsSettings
from attune.fedclient.work.objectives.base import LocalTask, Tensors, split
from attune.fedclient.work.predictors.base import Predictor


class TwoHeads(Predictor):
    """Both heads are linear in the same features, so one head with the sum of their weights has the sum of their logits."""

    def __init__(self, settings: TwoHeadsSettings) -> None:
        self._settings = settings

    def __repr__(self) -> str:
        return "TwoHeads()"

    def prepare(self, task: LocalTask) -> Tensors:
        model, own = split(task.start)
        return model | {name: model[name] + tensor for name, tensor in own.items()}
