"""The trained model itself."""

from __future__ import annotations

from attune.common.methods.settings.predictors import ModelSettings
from attune.fedclient.work.objectives.base import LocalTask, Tensors, split
from attune.fedclient.work.predictors.base import Predictor


class Model(Predictor):
    """The model's own logits."""

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings

    def __repr__(self) -> str:
        return "Model()"

    def prepare(self, task: LocalTask) -> Tensors:
        return split(task.start)[0]
