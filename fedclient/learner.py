"""Carries out orders: merges what was served, evaluates, trains, and commits the result to disk.

Owns the device's tensors; runs in the one worker thread. theta: all tensors of the model, and what the objective keeps beside
it, which is in no part and never handed in; received: what the server last served of those that are not private (Theta_0
until it served any).
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec
import torch

from common.aggregators.settings import CLASSES as AGGREGATORS
from common.data.prepare import Prepared
from common.errors import Forbidden, HomeMismatch, NoModel
from common.methods.algebra import Method, assign
from common.methods.build import objective_for, predictor_for
from common.methods.registry import method_from_options
from common.models.registry import build
from common.models.structure import tensors_of
from common.plan import Plan
from common.seeds import derive
from common.wire.tensors import Manifest, manifest_of
from fedclient.session import BlobRef, Order
from fedclient.state import Orders, Result, check_order_id
from fedclient.trainer import Cancelled, Progress, Seeds, Tensors, Trainer


class Learner:
    """One device's model.

    Arguments: `name` is the device's, and part of every seed; `prepared` its data; `orders` where results are kept.
    Errors: SettingError for a model or method that cannot be built here.
    """

    def __init__(self, plan: Plan, prepared: Prepared, name: str, orders: Orders, device: torch.device) -> None:
        self.plan, self.name, self.orders = plan, name, orders
        options = {**plan.method_options, "name": plan.method}
        method = method_from_options(options)
        model = build(plan.model, plan.seed)
        self.part_of = assign(method, model)
        self.returns = _returns(method)
        objective, predictor = objective_for(method, options), predictor_for(method, options)
        self.keeps_received = objective.keeps_received
        self.theta: Tensors = {name: tensor.clone() for name, tensor in tensors_of(model).items()}
        self.data = _on_device(prepared, device)
        self.trainer = Trainer(model, objective, predictor, plan.train, device, self.part_of)
        self.theta |= self.trainer.extras(self.theta)
        self.served: dict[str, str] = {}
        self.newest = orders.newest()
        received = None
        if self.newest is not None:
            self.theta = self._restored(orders.state(self.newest))
            received = orders.received(self.newest)
            self.served = dict(self.newest.served) if received is not None else {}
        self.received: Tensors = received or {
            name: self.theta[name] for name in self.part_of if self.part_of[name] != "private"
        }

    def __repr__(self) -> str:
        return f"<Learner {self.name}, newest {self.newest.order_id if self.newest else None}>"

    def expected(self, part: str) -> Manifest:
        """What a blob of this part must hold. Errors: Forbidden for a part that is private or that this method has not."""
        return manifest_of(self._of_part(part, self.theta))

    def missing(self, order: Order) -> list[BlobRef]:
        """The downloads of `order` that this device does not hold already."""
        return [ref for ref in order.downloads if self.served.get(ref.part) != ref.digest]

    def carry_out(
        self, order: Order, fetched: Mapping[str, Tensors], bytes_down: int, progress: Progress, cancelled: Callable[[], bool]
    ) -> Result:
        """Does what the order says and commits it; an order that is committed already is not done again.

        fetched: part -> tensors, for what `missing` named. Errors: Cancelled (nothing changed), TrainingDiverged, DiskFull,
        Forbidden (an order that asks for what is private).
        """
        if self.newest is not None and self.newest.order_id == order.id:
            return self.newest
        check_order_id(order.id)
        started = time.monotonic()
        returns = {part: self._of_part(part, self.theta).keys() for part in order.returns} if order.train else {}
        self._check_trains(order)
        theta, received = dict(self.theta), dict(self.received)
        served = dict(self.served)
        for ref in order.downloads:
            tensors = fetched[ref.part] if ref.part in fetched else self._of_part(ref.part, received)
            theta.update(tensors)
            received.update(tensors)
            served[ref.part] = ref.digest
        result = Result(order.id, order.round, order.train, len(self.data.train_x), len(self.data.test_x), served=served)
        if self.newest is None:  # what the device keeps beside the model starts from what it is first served
            theta |= self.trainer.extras({name: theta[name] for name in self.part_of})
        seeds, data = self._seeds(order.round), self.data
        before = self._accuracy(theta, received, seeds, cancelled)
        loss = after = None
        if order.train:
            trained = self.trainer.train(theta, received, data.train_x, data.train_y, seeds, progress, cancelled, order.trains)
            theta, loss = trained.tensors, trained.loss
            after = self._accuracy(theta, received, seeds, cancelled)
        parts = {part: self._handed_in(part, names, theta, received) for part, names in returns.items()}
        if cancelled():
            raise Cancelled("this work was replaced")
        result = msgspec.structs.replace(
            result,
            loss=loss,
            accuracy_before=before,
            accuracy_after=after,
            seconds=time.monotonic() - started,
            bytes_down=bytes_down,
            sequence=self.newest.sequence + 1 if self.newest else 1,
        )
        self.newest = self.orders.commit(result, theta, received if self.keeps_received else None, parts)
        self.theta, self.received, self.served = theta, received, served
        return self.newest

    def _handed_in(self, part: str, names: Iterable[str], theta: Tensors, received: Tensors) -> Tensors:
        if self.returns[part] == "change":
            return {name: theta[name] - received[name] for name in names}
        return {name: theta[name] for name in names}

    def finished(self) -> Tensors:
        """What the device predicts with now: all that a finished model needs. Errors: NoModel before the first order."""
        if self.newest is None:
            raise NoModel("no order was carried out yet")
        data = self.data
        return self.trainer.prepare(self.theta, self.received, data.train_x, data.train_y, self._seeds(self.newest.round))

    def _seeds(self, round_: int) -> Seeds:
        return lambda purpose: derive(self.plan.seed, self.name, round_, purpose)

    def _accuracy(self, theta: Tensors, received: Tensors, seeds: Seeds, cancelled: Callable[[], bool]) -> float | None:
        data = self.data
        if not len(data.test_x):
            return None
        prepared = self.trainer.prepare(theta, received, data.train_x, data.train_y, seeds, cancelled)
        return self.trainer.evaluate(prepared, data.test_x, data.test_y)

    def _of_part(self, part: str, tensors: Tensors) -> Tensors:
        found = {name: tensors[name] for name, kind in self.part_of.items() if kind == part and kind != "private"}
        if not found:
            raise Forbidden(f"the server asked for, or sent, the part {part[:40]!r}, which is private or not in this method")
        return found

    def _check_trains(self, order: Order) -> None:
        """Errors: Forbidden where the order trains what is not in this method."""
        known = {*self.part_of.values(), *(["personal"] if len(self.theta) > len(self.part_of) else [])}
        if unknown := set(order.trains) - known:
            raise Forbidden(f"the server asked to train {sorted(unknown)}; this method has {sorted(known)}")

    def _restored(self, state: Tensors) -> Tensors:
        if manifest_of(state) != manifest_of(self.theta):
            raise HomeMismatch(f"the state under {self.orders.path} is not of this federation's model; use another --home")
        return {name: state[name] for name in self.theta}


def _returns(method: Method) -> dict[str, str]:
    """Whether a part goes back as its values or as their change, as its aggregator wants it."""
    found: dict[str, str] = {}
    for kind in method.kinds:
        if kind != "private":
            module, _, attribute = AGGREGATORS[method.aggregators[kind]].partition(":")
            found[kind] = getattr(importlib.import_module(module), attribute).returns
    return found


def _on_device(data: Prepared, device: torch.device) -> Prepared:
    """The samples on the device if they fit there; else they stay and move batch by batch."""
    if device.type == "cpu":
        return data
    try:
        x, y = data.train_x.to(device), data.train_y.to(device)
        return Prepared(x, y, data.test_x.to(device), data.test_y.to(device), data.standardiser)
    except torch.OutOfMemoryError:
        return data
