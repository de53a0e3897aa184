"""What the worker thread is asked for besides orders: a learner for a plan, and the finished model."""

from __future__ import annotations

from pathlib import Path

from common.data.prepare import prepare
from common.data.shard import Shard
from common.errors import NoModel
from common.plan import Plan
from fedclient import device
from fedclient.artifact import ModelInfo, save
from fedclient.home import Home
from fedclient.learner import Learner
from fedclient.options import Options
from fedclient.state import Orders


def make_learner(plan: Plan, shard: Shard, name: str, home: Home, options: Options) -> Learner:
    """Everything that orders need. Errors: ShapeMismatch, UndeclaredLabels, SettingError, HomeMismatch."""

    # Threads are counted for each thread that computes, so this is set in the worker.
    device.set_threads(options.threads)
    return Learner(plan, prepare(shard, plan), name, Orders(home.orders), device.choose(options.device))


def save_model(learner: Learner, home: Home) -> Path:
    """The learner's current tensors as the finished model. Errors: NoModel before the first order, DiskFull."""

    plan, result = learner.plan, learner.newest
    if result is None:
        raise NoModel("no order was carried out yet")
    standardiser = learner.data.standardiser
    info = ModelInfo(
        name=learner.name,
        federation=plan.federation,
        method=plan.method,
        method_options=plan.method_options,
        model=plan.model,
        classes=plan.classes,
        train=plan.train,
        standardiser=standardiser.to_dict() if standardiser else None,
        accuracy=result.accuracy,
        samples=result.samples,
        test_samples=result.test_samples,
        round=result.round,
    )
    return save(home.model, info, learner.theta)
