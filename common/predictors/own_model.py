"""The model that a device keeps beside the shared one (pFedMe's personal model, Ditto)."""

from __future__ import annotations

from common.objectives.base import LocalTask, Tensors, split
from common.predictors.base import Predictor
from common.predictors.settings import OwnModelSettings


class OwnModel(Predictor):
    """Of every tensor the device's own, where the objective keeps one."""

    def __init__(self, settings: OwnModelSettings) -> None:
        self._settings = settings

    def __repr__(self) -> str:
        return "OwnModel()"

    def prepare(self, task: LocalTask) -> Tensors:
        model, own = split(task.start)
        return model | own
