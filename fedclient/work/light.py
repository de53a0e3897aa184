"""Learner of a light device, which has NumPy and no torch: the closed form of all devices' sums, on tables.

A light device trains no network, and fits no ordinary models. Its local model is the same closed form by its own samples alone.
The letters are those of common.methods.ridge.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from attune.common.config import convert
from attune.common.errors import NEEDS_TORCH, HomeMismatch, NoModel, WireError
from attune.common.exchange.messages import BlobRef, Order
from attune.common.faults import fail_at
from attune.common.hardware import return_free_memory
from attune.common.methods import ridge
from attune.common.methods.method import SOLVED
from attune.common.metrics import KEPT_RIVALS, RIVALS
from attune.common.models.options import ClosedFormOptions, check_closed_form
from attune.common.plan import ModelSpec, Plan
from attune.common.task import TaskName
from attune.common.wire.header import Manifest, TensorSpec
from attune.fedclient.data.holdout import folds_of
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.data.prepare import Prepared, prepare
from attune.fedclient.light_blobs import as_tensor
from attune.fedclient.messages import OrderResult
from attune.fedclient.options import DeviceOptions
from attune.fedclient.work.comparison import LOWEST, compared
from attune.fedclient.work.executor import Cancelled, Jobs, Work
from attune.fedclient.work.orders import Holdings, OrderStore
from attune.fedclient.work.state import check_order_id

DRAWS = (10.0, 1.0, 0.1)  # strengths of a device's own weights where other devices blend the closed form with networks
BATCH = 64  # samples
KEPT = "kept"  # the model that the device predicts with, committed beside what it was served
Array = Any  # of NumPy; common.methods.ridge takes it in place of a tensor


class FixedFeatures:
    """The features of the closed form. Raises SettingError for a model that is too large.

    Attributes:
        places: The place of each block.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.options, inputs = convert(ClosedFormOptions, spec.options, "model."), math.prod(spec.shape)
        check_closed_form(spec, self.options.blocks(inputs))
        self.sizes = [1 + number for number in self.options.blocks(inputs)]
        self.places = ridge.places_of(self.sizes)
        self._drawn = [numbers.astype(np.float64) for numbers in self.options.drawn(inputs)]

    def of(self, x: Array) -> Array:
        """Return Z (N, D) of samples (N, ...)."""
        (frequency_IR, phase_R), flat_NI = self._drawn, np.asarray(x).reshape(len(x), -1).astype(np.float64)
        Z_ND = np.empty((len(flat_NI), sum(self.sizes)))
        for start in range(0, len(flat_NI), BATCH):  # in batches, because the steps to them take several times their memory
            some = slice(start, start + BATCH)
            Z_ND[some] = self.options.values(flat_NI[some], frequency_IR, phase_R, np)
        return Z_ND


def answers_of(task: TaskName, scores_NC: Array) -> Array:
    """Return what scores say: indices of classes (N,), whether each label is there, or numbers (N, K)."""
    return scores_NC.argmax(axis=1) if task == "classes" else scores_NC > 0 if task == "multilabel" else scores_NC


def right_of(task: TaskName, answers: Array, y: Array) -> Array:
    """Return which answers are right, (N,) or (N, K) bool; of numbers scores (N,), as measures.Numbers."""
    return 1 - np.square(answers - y).mean(axis=1) if task == "regression" else answers == y


def mean_score(right: Array) -> float:
    """Return the mean of `right_of`, LOWEST at least."""
    return max(LOWEST, float(np.mean(right)))


class LightLearner:
    """Implements fedclient.work.executor.AnyLearner.

    Args:
        plan: The plan, as limits.light_plan gives it.
        prepared: The device's data.
        name: Its name.
        orders: The store of results.

    Raises:
        HomeMismatch: The store is of another model.
        SettingError: The model is too large.
    """

    def __init__(self, plan: Plan, prepared: Prepared, name: str, orders: OrderStore) -> None:
        self.plan, self.name, self.orders = plan, name, orders
        self.standardiser, self.targets = prepared.standardiser, prepared.targets
        self._part, self._features = SOLVED if plan.closed_form else "attended", FixedFeatures(plan.model)
        self._sharpness = None if plan.task == "regression" else float(self._features.options.sharpness or 1.0)
        y, outputs = np.asarray(prepared.train_y), plan.model.classes
        self._x, self._test_x = np.asarray(prepared.train_x), np.asarray(prepared.test_x)
        self._T_NC: Array = np.eye(outputs)[y] if plan.task == "classes" else y.astype(np.float64)
        self._T_NC = 2 * self._T_NC - 1 if plan.task == "multilabel" else self._T_NC
        self._test_y, self._groups = np.asarray(prepared.test_y), prepared.test_groups
        labels = y if plan.task == "classes" else np.zeros(len(y))
        self._fold_N: Array = folds_of(labels, plan.model.kind, prepared.groups, np.zeros(0, dtype=np.intp))
        shapes = {ridge.WEIGHT: (outputs, sum(self._features.sizes)), ridge.STRENGTH: (), ridge.BLOCK: ()}
        shapes[ridge.SIZES] = (len(self._features.sizes),)
        manifest: Manifest = {key: TensorSpec("F64", shape) for key, shape in shapes.items()}
        self._state: dict[str, Array] = {key: np.zeros(shape) for key, shape in shapes.items()}
        self._state[ridge.SIZES] = np.array(self._features.sizes, dtype=np.float64)
        self.newest = orders.newest()
        served: Mapping[str, str] = {}
        if self.newest is not None:
            self._state, served = _arrays(orders.state(self.newest)), self.newest.served
            if {key: values.shape for key, values in self._state.items()} != shapes:
                raise HomeMismatch(f"the state under {orders.where} is not of this federation's model; use another --home")
        self.holdings = Holdings({self._part: manifest}, False, served)

    @property
    def size_bytes(self) -> int:
        """Bytes of the samples and of the weights, which it holds between orders."""
        return int(self._x.nbytes + self._test_x.nbytes + sum(values.nbytes for values in self._state.values()))

    def missing(self, order: Order) -> list[tuple[BlobRef, Manifest]]:
        """Return the missing values of an order, as they are: no smaller form is read here."""
        return [(ref.whole, expected) for ref, expected in self.holdings.missing(order)]

    def let_go(self) -> None:
        """Release the learner. No-op: its arrays are freed with it."""

    def jobs(self, work: Work) -> Jobs[OrderResult]:
        """Return `carry_out` as a generator, as Learner.jobs."""
        yield from ()
        return self.carry_out(work)

    def carry_out(self, work: Work) -> OrderResult:
        """Carry out the order and commit the result. An order that is committed already is not repeated.

        Raises:
            Cancelled: The work was given up; nothing has changed.
            DiskFull: The result cannot be committed.
            Forbidden: The order asks for, or serves, another part than the closed form.
            WireError: The order's id is impossible, or it asks for an encoding.
        """
        order, before, started = work.order, self.newest, time.monotonic()
        if before is not None and before.order_id == order.id:
            return before
        check_order_id(order.id)
        state, served = dict(self._state), dict(self.holdings.served)
        for ref in order.downloads:
            self.holdings.expected(ref.part)
            state = _arrays(work.fetched.get(ref.digest, state))
            served[ref.part] = ref.digest
        for part in order.returns:
            self.holdings.expected(part)
            if encoding := order.encodings.get(part, ""):
                raise WireError(f"a light device hands in no {encoding[:40]!r}: leave round.encoding out ({NEEDS_TORCH})")
        fail_at(self.name, order.round, "training")
        is_training = order.work == "train"
        result = OrderResult(
            order_id=order.id,
            round=order.round,
            trained=is_training,
            task=self.plan.task,
            samples=len(self._x),
            test_samples=len(self._test_y),
            bytes_down=work.bytes_down,
            served=served,
            versions=(dict(before.versions) if before else {}) | {ref.part: ref.version for ref in order.downloads},
            sequence=before.sequence + 1 if before else 1,
            of_samples=is_training and self._part in order.returns and self._part != SOLVED,
        )
        beside, parts = {}, {part: _tensors(self._sums(state)) for part in order.returns if is_training}
        if not is_training:
            result, kept = self._compared(result, state)
            beside = {KEPT: _tensors(kept)}
        if work.cancelled():
            raise Cancelled("this work was replaced")
        if is_training:
            fail_at(self.name, order.round, "trained")
        else:
            fail_at(self.name, order.round, "compared")
        result = msgspec.structs.replace(result, seconds=time.monotonic() - started)
        self.newest = self.orders.commit(result, _tensors(state), beside, parts)
        fail_at(self.name, order.round, "order-committed")
        return_free_memory()
        self._state, self.holdings = state, msgspec.structs.replace(self.holdings, served=served)
        return self.newest

    def _sums(self, state: Mapping[str, Array]) -> dict[str, Array]:
        """Return what the device hands in: its sums, and where it was served weights the errors of those that it draws."""
        Z_ND = self._features.of(self._x)
        W_CD, errors_nL = state[ridge.WEIGHT], np.zeros((len(self._features.places), len(ridge.STRENGTHS)))
        if self._part != SOLVED and W_CD.any() and self._fold_N is not None:
            sharpness = self._sharpness if self.plan.task == "classes" else None
            for block, place in enumerate(self._features.places):
                errors_nL[block] = ridge.fold_errors(
                    Z_ND[:, place], self._T_NC, self._fold_N, W_CD[:, place], ridge.STRENGTHS, sharpness
                )
        return {**ridge.sums_of(Z_ND, self._T_NC, self._features.sizes), ridge.ERRORS: errors_nL}

    def _compared(self, result: OrderResult, state: Mapping[str, Array]) -> tuple[OrderResult, dict[str, Array]]:
        """Return the result with the scores of the federation's model and of the local one, and the tensors of the better.

        The better one has the smaller squared error of samples out of fold; of equal ones it is the federation's.
        """
        block = int(state[ridge.BLOCK])
        place = self._features.places[block]
        centre_CD, strength = state[ridge.WEIGHT][:, place], float(state[ridge.STRENGTH])
        strengths = DRAWS if self._part == SOLVED and strength else (strength,)
        Z_ND = self._features.of(self._x)[:, place]
        local, error = self._best(Z_ND, np.zeros_like(centre_CD), ridge.STRENGTHS)
        models = {"local": local}
        choice = "local"
        if centre_CD.any():
            models["personalized"], own_error = self._best(Z_ND, centre_CD, strengths)
            choice = "local" if self._fold_N is not None and error < own_error else "personalized"
        task, y, ends = self.plan.task, self._test_y, self._features.of(self._test_x)[:, place]
        right = {name: right_of(task, answers_of(task, ends @ W_CD.T), y) for name, W_CD in models.items()} if len(y) else {}
        constant = answers_of(task, np.repeat(self._T_NC.mean(axis=0, keepdims=True), len(y), axis=0)) if right else None
        scores: dict[str, Any] = {}
        if right and len(models) > 1:
            for one, rivals in (("personalized", RIVALS), (choice, KEPT_RIVALS)):
                scores |= compared(right[one], right["local"], rivals["local"], self._groups)
        accuracies = {name: mean_score(of) for name, of in right.items()}
        result = msgspec.structs.replace(
            result,
            own_choice="personalized" if len(models) > 1 else "local",
            accuracy_before=accuracies.get("personalized"),
            accuracy_local=accuracies.get("local"),
            accuracy_kept=accuracies.get(choice),
            accuracy_constant=None if constant is None else mean_score(right_of(task, constant, y)),
            kept=choice,
            weights={choice: 1.0},
            validation_samples=0 if self._fold_N is None else int((self._fold_N >= 0).sum()),
            **scores,
        )
        W_CD = np.zeros_like(state[ridge.WEIGHT])
        W_CD[:, place] = models[choice]
        return result, {**state, ridge.WEIGHT: W_CD, ridge.STRENGTH: np.zeros(())}

    def _best(self, Z_ND: Array, centre_CD: Array, strengths: Sequence[float]) -> tuple[Array, float]:
        """Return the weights that are drawn from the centre by the best strength, (C, D), and their squared error out of fold.

        With a strength of 0 they are the centre, which does not know these samples.
        """
        T_NC, fold_N = self._T_NC, self._fold_N
        if strengths[0] == 0:
            known_N = slice(None) if fold_N is None else fold_N >= 0
            return centre_CD, float(ridge.error_of((Z_ND[known_N] @ centre_CD.T)[None], T_NC[known_N], None)[0])
        if fold_N is None:
            return ridge.drawn(Z_ND, T_NC, strengths[0], centre_CD), 0.0
        error_L = ridge.fold_errors(Z_ND, T_NC, fold_N, centre_CD, strengths, None)
        best = int(error_L.argmin())
        return ridge.drawn(Z_ND, T_NC, strengths[best], centre_CD), float(error_L[best])

    def finished(self) -> dict[str, dict[str, Array]]:
        """Return what the device predicts with now, as Learner.finished.

        Raises:
            NoModel: There was no order yet.
        """
        if self.newest is None:
            raise NoModel("no order was carried out yet")
        kept = self.orders.beside(self.newest, KEPT)
        if kept is None:  # the last order was no evaluation
            self.newest, kept = self._compared(self.newest, self._state)
        return {self.newest.choice: _tensors(_arrays(kept))}


def _arrays(tensors: Mapping[str, Any]) -> dict[str, Array]:
    return {name: np.asarray(tensor) for name, tensor in tensors.items()}


def _tensors(arrays: Mapping[str, Array]) -> dict[str, Any]:
    return {name: as_tensor(np.asarray(values, order="C")) for name, values in arrays.items()}


def make_learner(
    plan: Plan, shard: LazyShard, name: str, orders: Callable[[str], OrderStore], options: DeviceOptions
) -> LightLearner:
    """Make the learner of a light device. The arguments are those of fedclient.work.learner.make_learner.

    Raises:
        ShapeMismatch, UndeclaredLabels: The shard does not fit the plan.
        SettingError: The model is too large.
        HomeMismatch: The stored orders are damaged.
    """
    return LightLearner(plan, prepare(shard.load_for(plan), plan), name, orders(name))
