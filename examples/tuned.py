"""A finished FedAvg model that is trained on a device's own samples before it predicts: a cheap and strong rival.

It must be tuned deep and fast enough: one epoch at the usual rate would be too weak a rival. `fedavg+ft` does the same with
these settings.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from attune.common import hardware
from attune.common.methods.settings.objectives import FineTuneSettings, SgdSettings
from attune.common.models.registry import build
from attune.common.plan import Plan
from attune.common.seeds import derive
from attune.fedclient.data.prepare import prepare
from attune.fedclient.data.shard import load_shard
from attune.fedclient.home import DeviceHome
from attune.fedclient.model.artifact import Model
from attune.fedclient.work.executor import alone
from attune.fedclient.work.objectives.descent import Sgd
from attune.fedclient.work.predictors.base import FineTune
from attune.fedclient.work.trainer import Trainer

TUNING = FineTuneSettings(tune_epochs=20, alpha=0.1)


def tuned(shard: Path, home: Path, settings: FineTuneSettings = TUNING) -> float:
    """Return the accuracy on the shard's test part of the model in this device's home, tuned on the shard's training part."""
    hardware.set_threads(1)  # as on a device; more threads make so small a model slower
    plan = msgspec.json.decode(DeviceHome(home).plan.read_bytes(), type=Plan)
    model, data = Model.load(DeviceHome(home).model, allow_models=[plan.model.name]), prepare(load_shard(shard), plan)
    trainer = Trainer(build(plan.model, plan.seed), Sgd(SgdSettings()), FineTune(settings), plan.train, torch.device("cpu"))

    def seeds(purpose: str) -> int:
        return derive(plan.seed, model.info.name, model.info.round, purpose)

    personal = alone(trainer.preparing(model.tensors, {}, data.train_x, data.train_y, seeds))
    return trainer.evaluate(personal, data.test_x, data.test_y)
