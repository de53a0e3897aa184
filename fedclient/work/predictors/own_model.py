"""The model that a device keeps beside the shared one (pFedMe's personal model, Ditto)."""

from __future__ import annotations

from attune.common.methods.settings.predictors import OwnModelSettings
from attune.fedclient.work.objectives.base import LocalTask, Tensors, split
from attune.fedclient.work.predictors.base import Predictor


class OwnModel(Predictor):
    """Of every tensor the device's own, where the objective keeps one."""

    def __init__(self, settings: OwnModelSettings) -> None:
        self._settings = settings

    def __repr__(self) -> str:
        return "OwnModel()"

    def prepare(self, task: LocalTask) -> Tensors:
        model, own = split(task.start)
        return model | own
