"""The model after some training on the device's own samples (FedAvg + FT; Per-FedAvg's one step)."""

from __future__ import annotations

import msgspec

from attune.common.methods.settings.predictors import FineTuneSettings
from attune.fedclient.work.job import Jobs, alone
from attune.fedclient.work.objectives.base import LocalTask, Tensors, Trained, split
from attune.fedclient.work.objectives.descent import Descent
from attune.fedclient.work.predictors.base import Predictor


class FineTune(Predictor[FineTuneSettings]):
    """theta after some plain SGD. The device only predicts with it; training goes on from theta."""

    def prepare(self, task: LocalTask) -> Tensors:
        return alone(self.work(task))

    def work(self, task: LocalTask) -> Jobs[Tensors]:
        settings = msgspec.structs.replace(
            task.settings,
            lr=self._settings.alpha or task.settings.lr,
            local_epochs=self._settings.tune_epochs,
            local_steps=self._settings.tune_steps,
        )
        tuned: Trained = yield Descent(task, settings, split(task.start)[0], task.plain, purpose="tune")
        return tuned.tensors
