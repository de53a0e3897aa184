"""The trained model itself."""

from __future__ import annotations

from common.objectives.base import LocalTask, Tensors, split
from common.predictors.base import Predictor
from common.predictors.settings import ModelSettings


class Model(Predictor):
    """The model's own logits."""

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings

    def __repr__(self) -> str:
        return "Model()"

    def prepare(self, task: LocalTask) -> Tensors:
        return split(task.start)[0]
