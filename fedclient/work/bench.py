"""What the thread of tensors is asked for: a device's bench, orders carried out at it, and the finished model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from attune.common.plan import Plan
from attune.common.wire.tensors import Manifest
from attune.fedclient.data.prepare import prepare
from attune.fedclient.data.shard import Shard
from attune.fedclient.data.source import Source
from attune.fedclient.home import Home
from attune.fedclient.model.artifact import ModelInfo, save
from attune.fedclient.options import Options
from attune.fedclient.session import BlobRef, Order
from attune.fedclient.work import hardware as device
from attune.fedclient.work.learner import Learner
from attune.fedclient.work.state import Orders, Result, Tensors
from attune.fedclient.work.trainer import Progress


class Bench:
    """One device's learner, which exists while an order is worked on; between orders only if `keep`.

    What a learner is made from (shard, plan, the newest order on disk) is what a restart makes it from, so that putting it
    away changes no bit. Everything but `newest`, `orders` and `rest` belongs to the thread of tensors.
    Errors of the constructor: those of make_learner.
    """

    def __init__(self, plan: Plan, source: Source, name: str, home: Home, options: Options, keep: bool) -> None:
        self._home, self._keep = home, keep
        self._make = partial(_make, plan, source, name, home, options)
        self._learner: Learner | None = None
        learner = self._awake()
        self.newest, self.orders = learner.newest, learner.orders
        self.rest()

    def __repr__(self) -> str:
        return f"<Bench in {self._home.path}, {'at rest' if self._learner is None else 'in use'}>"

    def _awake(self) -> Learner:
        learner = self._learner or self._make()
        self._learner = learner
        return learner

    def rest(self) -> None:
        """Lets go of all tensors, unless they are to be kept."""
        if not self._keep:
            self._learner = None

    def missing(self, order: Order) -> list[tuple[BlobRef, Manifest]]:
        """What has to be fetched for `order`, and what it must hold. Errors: Forbidden."""
        learner = self._awake()
        return [(ref, learner.expected(ref.part)) for ref in learner.missing(order)]

    def carry_out(
        self,
        order: Order,
        fetched: dict[str, Tensors],
        bytes_down: int,
        progress: Progress,
        cancelled: Callable[[], bool],
    ) -> Result:
        """As Learner.carry_out."""
        learner = self._awake()
        try:
            return learner.carry_out(order, fetched, bytes_down, progress, cancelled)
        finally:
            self.newest = learner.newest

    def save(self) -> Path:
        """The device's model, as save_model."""
        path = save_model(self._awake(), self._home)
        self.rest()
        return path


def _make(plan: Plan, source: Source, name: str, home: Home, options: Options) -> Learner:
    return make_learner(plan, source.load(), name, home, options)


def make_learner(plan: Plan, shard: Shard, name: str, home: Home, options: Options) -> Learner:
    """Everything that orders need. Errors: ShapeMismatch, UndeclaredLabels, SettingError, HomeMismatch."""

    # Threads are counted for each thread that computes, so this is set in the worker.
    device.set_threads(options.threads)
    where = device.choose(options.device)
    return Learner(plan, prepare(shard, plan), name, Orders(home.orders), where, options.keep, options.baseline)


def save_model(learner: Learner, home: Home) -> Path:
    """What the device predicts with now, as the finished model. Errors: NoModel before the first order, DiskFull."""

    plan, result, tensors = learner.plan, learner.newest, learner.finished()
    assert result is not None  # noqa: S101 (there is a finished model)
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
        kept=result.kept,
        accuracy=result.accuracy,
        accuracies={name: value for name, value in result.accuracies.items() if value is not None},
        samples=result.samples,
        test_samples=result.test_samples,
        round=result.round,
    )
    return save(home.model, info, tensors)
