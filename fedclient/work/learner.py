"""Learner of one device: it merges what was served, evaluates, trains or compares, and commits the result to disk.

A learner owns the device's state (fedclient.work.device_state), and runs on the worker's thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, cached_property, partial
from typing import Literal

import msgspec
import torch
from msgspec.structs import replace

from attune.common import hardware
from attune.common.errors import Forbidden, NoModel, SettingError
from attune.common.exchange.encodings import PartEncoding
from attune.common.exchange.messages import BlobRef, Order
from attune.common.exchange.registry import settings_of, transforms_for
from attune.common.exchange.transform import SUMMED, Chain, DeviceContext, PartUpdate
from attune.common.faults import fail_at
from attune.common.methods.method import SOLVED
from attune.common.methods.ridge import GAMMA, nothing_served
from attune.common.plan import Plan
from attune.common.seeds import derive
from attune.common.wire.header import Manifest
from attune.common.wire.tensors import manifest_of
from attune.fedclient.data.holdout import fold_of
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.data.prepare import Prepared, prepare
from attune.fedclient.gate import Gate, finished_network
from attune.fedclient.messages import OrderResult
from attune.fedclient.options import NONE, DeviceOptions, Hooks
from attune.fedclient.work import baselines
from attune.fedclient.work.baselines import shared_model
from attune.fedclient.work.build import family_of, objective_for, on_processor, predictor_for
from attune.fedclient.work.device_state import DeviceState
from attune.fedclient.work.dial import dial_of
from attune.fedclient.work.embedding import FROM_SEED, PART, EmbeddingSource, embedding_of
from attune.fedclient.work.evaluation import DeviceModels, Evaluation
from attune.fedclient.work.executor import Cancelled, Jobs, Work, alone
from attune.fedclient.work.objectives.base import Tensors
from attune.fedclient.work.orders import Holdings, OrderStore, check_encodings, manifests_of, rebuilt
from attune.fedclient.work.own_loop import check_loop
from attune.fedclient.work.portfolio.portfolio import portfolio_of, reader_of
from attune.fedclient.work.private.private_learning import PrivateLearning, noisy_metrics, private_learning, quietly
from attune.fedclient.work.state import check_order_id
from attune.fedclient.work.task_measures import measure_of
from attune.fedclient.work.trainer import Seeds, Trainer

KEPT = "kept-{}"  # the tensors of a model that the device predicts with, committed beside the state


class Learner:
    """Model of one device.

    Args:
        name: The device's name, which is part of every seed.
        prepared: Its data.
        orders: The store of results.
        keep: Same as in DeviceOptions.
        trains_local: Whether a network is trained on this device alone (DeviceOptions.trains_local).
        hooks: Same as in DeviceOptions.
        private: How it trains with noise; None: without.
        tells_scores: Whether losses and scores may leave the device, be it in a sum with others'.
        source: Where its embedding is drawn from, if it keeps one.
        fits_alone: Whether ordinary models are fitted on its samples alone.

    Raises:
        SettingError: The model or the method cannot be built here.
    """

    def __init__(
        self, plan: Plan, prepared: Prepared, name: str, orders: OrderStore, device: torch.device,
        keep: Literal["best", "personalized"] = "best", trains_local: bool = False, hooks: Hooks = NONE,
        private: PrivateLearning | None = None, tells_scores: bool = True, source: EmbeddingSource = FROM_SEED,
        fits_alone: bool = False,
    ) -> None:  # fmt: skip
        self.plan, self.name, self.orders, self.private, self.tells_scores = plan, name, orders, private, tells_scores
        shared = shared_model(plan, device)
        configured = shared.configured
        method = configured.method
        if hooks.train is not None:
            check_loop(configured, private is not None)
        self.part_of = shared.part_of
        chosen, blends = baselines.own_name(method, self.part_of), keep == "best"
        has_rival = chosen == "personalized" and baselines.has_common(self.part_of, configured.objective) and not plan.matrix
        settings = settings_of({name: plan.transforms[name] for name in plan.device_transforms})
        self.transforms_of = cache(lambda part: Chain([*transforms_for(part, settings, part == SOLVED), PartEncoding()]))
        self.returns: dict[str, str] = {
            kind: plan.returns.get(kind, part.returns) for kind, part in configured.aggregators.items()
        }
        objective, predictor = objective_for(configured), predictor_for(configured)
        dial = dial_of(configured.dial, self.part_of, shared.components)
        # Tensors whose trained values are kept; otherwise they are theta's.
        self.keeps_trained = [name for names in dial.values() for name in names] if method.evaluate == "served" else []
        self.data = on_processor(prepared, device)
        self.standardiser, self.targets = prepared.standardiser, prepared.targets
        measure, family = measure_of(plan), (family_of(plan), "method")
        self.trainer = Trainer(
            shared.network, objective, predictor, plan.train, device, self.part_of, family, hooks, plan.classes, measure, name,
            fold=fold_of(prepared, plan) if objective.hands_in else None,
        )  # fmt: skip
        initial: Tensors = {name: tensor.clone() for name, tensor in shared.initial.items()}
        embedding = embedding_of(configured, shared.network.model, plan, name, len(prepared.train_x), source)
        wire: dict[str, Manifest] = {PART: embedding.generator.manifest} if embedding else {}
        if plan.closed_form:
            wire[SOLVED] = manifest_of(nothing_served(plan))
        travels = [name for name in self.part_of if self.part_of[name] != "private"]
        state = DeviceState(initial | self.trainer.extras(initial), {name: initial[name] for name in travels}, embedding)
        served: Mapping[str, str] = {}
        self.newest = orders.newest()
        if self.newest is not None:
            if private is not None:
                private.check_home(self.newest.charged)
            state, knows_received = state.restored(orders, self.newest)
            if knows_received:
                served = {part: digest for part, digest in self.newest.served.items() if part not in wire}
        self.holdings = Holdings(manifests_of(self.part_of, state.theta) | wire, has_rival, served)
        local = trains_local and chosen != "local"
        self.baselines = baselines.Baselines(plan, shared, device, state.local, local, hooks, name)
        self._take(replace(state, local=self.baselines.local))
        read = reader_of(shared.network, shared.initial)
        fitted = cache(partial(portfolio_of, self.data, plan, orders, device, read)) if fits_alone else lambda: None
        self.evaluation = Evaluation(plan, self.data, self.trainer, self.baselines, chosen, blends, dial, hooks, fitted)

    @property
    def size_bytes(self) -> int:
        """Bytes of the samples and of the models' tensors, roughly what it holds in memory."""
        held = (*self._samples, *self.state.all_tensors())
        return sum([tensor.nbytes for tensor in dict(zip(map(id, held), held, strict=True)).values()])

    @cached_property
    def _samples(self) -> list[torch.Tensor]:
        return [value for value in vars(self.data).values() if isinstance(value, torch.Tensor)]

    def missing(self, order: Order) -> list[tuple[BlobRef, Manifest]]:
        """Return the missing values of an order, as Holdings.missing."""
        return self.holdings.missing(order)

    def let_go(self) -> None:
        """Release the learner. No-op: its tensors are freed with it."""

    def carry_out(self, work: Work) -> OrderResult:
        """Carry out the order and commit the result. An order that is committed already is not repeated.

        Raises:
            Cancelled: The work was given up; nothing has changed.
            TrainingDiverged: The loss or a tensor is not finite.
            DiskFull: The result cannot be committed.
            Forbidden: The order asks for a private part.
        """
        return alone(self.jobs(work))

    def jobs(self, work: Work) -> Jobs[OrderResult]:
        """Return `carry_out` as a generator, which stops at what many devices can compute together."""
        order = work.order
        if self.newest is not None and self.newest.order_id == order.id:
            return self.newest
        started = time.monotonic()
        self._check(order)
        fetched = self._rebuilt(order, work.fetched)
        state, served = self._merged(order, fetched)
        result = self._begun(order, work, served)
        kept: dict[str, Tensors] = {}
        if order.work == "train":
            result, state = yield from self._trained(result, state, work)
        else:
            result, kept = yield from self._compared(result, state, fetched, work)
        state, parts, tells = self._handed_in(state, order, result)
        if work.cancelled():
            raise Cancelled("this work was replaced")
        fail_at(self.name, order.round, "trained")
        result = msgspec.structs.replace(result, seconds=time.monotonic() - started, of_samples=tells)
        beside = state.beside(self.trainer.objective.keeps_received)
        beside |= {KEPT.format(name): tensors for name, tensors in kept.items()}
        self.newest = self.orders.commit(result, state.theta, beside, parts)
        fail_at(self.name, order.round, "order-committed")
        self.holdings = replace(self.holdings, served=served)
        self._take(state)
        return self.newest

    def _take(self, state: DeviceState) -> None:
        """Continue from the state after a committed order."""
        self.state, self.trainer.state = state, state.loop
        self.baselines.keep(state.local, state.loop_local)

    def _check(self, order: Order) -> None:
        """Check that the order can be carried out.

        Raises:
            Forbidden: The order trains a kind of tensors that this method does not have.
            WireError: The order's id or an encoding is impossible.
        """
        check_order_id(order.id)
        known = {*self.part_of.values(), *(["personal"] if len(self.state.theta) > len(self.part_of) else [])}
        if unknown := set(order.trains) - known:
            raise Forbidden(f"the server asked to train {sorted(unknown)}; this method has {sorted(known)}")
        check_encodings(order)

    def _rebuilt(self, order: Order, fetched: Mapping[str, Tensors]) -> dict[str, Tensors]:
        """Return the values that the fetched blobs stand for. Errors are those of `rebuilt`."""
        if {ref.sent.encoding for ref in (*order.cold_start, *order.downloads)} <= {""}:
            return dict(fetched)
        here = [(ref, expected) for ref, expected in self.missing(order) if ref.digest in fetched]
        return {ref.digest: rebuilt(ref, expected, fetched[ref.digest], self._held(ref.part)) for ref, expected in here}

    def _held(self, part: str) -> Tensors:
        return self.state.held(part, self.holdings.expected(part))

    def _merged(self, order: Order, fetched: Mapping[str, Tensors]) -> tuple[DeviceState, dict[str, str]]:
        """Return the state with what the order serves, and the digest of each received part."""
        served = {ref.part: ref.digest for ref in order.downloads}
        state = self.state.served(order, fetched, self.holdings.parts)
        if self.newest is None:  # the objective's tensors start from the model that is first served
            theta = state.theta | self.trainer.extras({name: state.theta[name] for name in self.part_of})
            state = replace(state, theta=theta)
        return state, {**self.holdings.served, **served}

    def _begun(self, order: Order, work: Work, served: Mapping[str, str]) -> OrderResult:
        """Return the part of an order's result that is known before any work."""
        before, ranked = self.newest, self.evaluation.is_ranked
        return OrderResult(
            order_id=order.id,
            round=order.round,
            trained=order.work == "train",
            own_choice=self.evaluation.own_choice,
            task=self.plan.scored if self.evaluation.scores_by_plan else self.plan.task,
            ranked=1 if ranked else None,
            samples=self.data.train_x.shape[0],
            test_samples=self.data.test_x.shape[0],
            accuracy_constant=self.evaluation.constant,
            bytes_down=work.bytes_down,
            served=dict(served),
            encodings=order.encodings if self._returned(order) else {},
            charged=(before.charged if before else 0) + int(self.private is not None and order.work == "train"),
            versions=(dict(before.versions) if before else {}) | {ref.part: ref.version for ref in order.downloads},
            sequence=before.sequence + 1 if before else 1,
        )

    def _trained(self, result: OrderResult, state: DeviceState, work: Work) -> Jobs[tuple[OrderResult, DeviceState]]:
        """Train, and return the result and the state after it.

        The result has accuracies before and after training, if wanted.
        """
        if self.plan.matrix:  # nothing is trained
            return result, replace(state, theta=state.theta | finished_network(self.plan, self.orders.model))
        order, cancelled, theta, received = work.order, work.cancelled, state.theta, state.received
        data, seeds, passes = self.data, self._seeds(order.round), 1 if state.local is None else 2

        def first(done: float) -> None:
            fail_at(self.name, order.round, "training")
            work.progress(done / passes)

        def second(done: float) -> None:
            work.progress((1 + done) / passes)

        before = after = None
        scored = self.plan.train.evaluate is not False
        if scored:
            before = yield from quietly(self.private, self.evaluation.accuracy(theta, received, seeds, cancelled), None)
        noise = None
        if self.private is not None:
            noise = self.private.order_noise(order, theta, received, self.newest.charged if self.newest else 0)
        trained = yield from self.trainer.training(
            theta, received, data.train_x, data.train_y, seeds, first, cancelled, order.trains, order.round, noise
        )
        if scored:
            scoring = self.evaluation.accuracy(trained.tensors, received, seeds, cancelled)
            after = yield from quietly(self.private, scoring, None)
        noisy = noisy_metrics(noise, self.trainer.network_logits, theta, trained.tensors, data, scored)
        result = msgspec.structs.replace(result, loss=trained.loss, accuracy_before=before, accuracy_after=after, noisy=noisy)
        state = replace(state, theta=dict(trained.tensors), loop=trained.state)
        if self.keeps_trained:
            state = replace(state, trained={name: state.theta[name] for name in self.keeps_trained})
        local = yield from quietly(self.private, self.baselines.trained(data, seeds, second, cancelled, order.round), None)
        if local is not None:
            state = replace(state, local=local.tensors, loop_local=local.state)
        return result, state

    def _compared(
        self, result: OrderResult, state: DeviceState, fetched: Mapping[str, Tensors], work: Work
    ) -> Jobs[tuple[OrderResult, dict[str, Tensors]]]:
        """Compare the models, and return the result and the tensors of each model that the device keeps."""
        order, network = work.order, dict[str, torch.Tensor]()
        with suppress(NoModel, SettingError):
            network = finished_network(self.plan, self.orders.model) if self.plan.matrix else network
        state = replace(state, theta=state.theta | network)
        common = state.common(self.holdings.cold_start(order), fetched, self.holdings.parts)
        models = DeviceModels(state.theta, state.received, common, state.trained, state.solved, state.given)
        comparing = self.evaluation.compared(result, models, order, self._seeds(order.round), work.cancelled)
        result, kept = yield from quietly(self.private, comparing, (result, {}))
        if others := {name: fetched[ref.digest] for name, ref in self.holdings.others(order).items()}:
            result = replace(result, others=(yield from self.evaluation.others(network, others)))
        fail_at(self.name, order.round, "compared")
        if self.private is not None and math.isfinite(spent := self.private.spent):
            result = msgspec.structs.replace(result, epsilon=spent)
        return result, dict(kept)

    def _returned(self, order: Order) -> list[str]:
        """Return the parts that the device hands in.

        Raises:
            Forbidden: One of them is private.
        """
        return [part for part in order.returns if self.holdings.expected(part)] if order.work == "train" else []

    def _handed_in(self, state: DeviceState, order: Order, result: OrderResult) -> tuple[DeviceState, dict[str, Tensors], bool]:
        """Return the state after handing in, the encoded tensors of each part, and whether they are sums over samples."""
        parts, owed, embedding, given, of_samples = {}, dict(state.owed), state.embedding, state.given, False
        for part in self._returned(order):
            change = self.returns[part] == "change"
            before = state.received if change or part in [ref.part for ref in order.downloads] else None
            if part == SOLVED:
                is_one_sum = GAMMA in self.holdings.expected(SOLVED)
                values = self.evaluation.sums(is_one_sum)
                given = values if is_one_sum else {}
            elif embedding and part == PART:
                before = embedding.network
                values, embedding = embedding.handed_in(state.theta, state.received, order.round)
            elif self.trainer.objective.hands_in:
                values, of_samples = self.trainer.objective.handed_in(state.theta)
            else:
                names = self.holdings.expected(part)
                values = {name: state.theta[name] - state.received[name] if change else state.theta[name] for name in names}
            parts[part], errors = self._written(part, values, before, order, result)
            owed |= errors
        return replace(state, owed=owed, embedding=embedding, given=given), parts, of_samples

    def _written(
        self, part: str, values: Tensors, before: Tensors | None, order: Order, result: OrderResult
    ) -> tuple[Tensors, Tensors]:
        """Return the encoded tensors of a part, and the errors of the encoding.

        The server decodes them with the value of the part that this order has served, `before`.
        """
        change = self.returns[part] == "change"
        encoding, seed = order.encodings.get(part, ""), self._seeds(order.round)
        scores = {name: value for name in SUMMED if (value := getattr(result, name)) is not None}
        measured = scores if self.tells_scores else result.noisy
        context = DeviceContext(
            self.name, part, order.round, encoding, change, before, self.state.owed, seed, measured=measured
        )
        transforms = self.transforms_of(part)
        update = transforms.on_device(PartUpdate(self.name, float(self.data.train_x.shape[0]), values), context)
        return dict(update.tensors), context.errors

    def finished(self) -> dict[str, Tensors]:
        """Return what the device predicts with now: the tensors of each model that counts.

        Raises:
            NoModel: There was no order yet.
        """
        if self.newest is None:
            raise NoModel("no order was carried out yet")
        data, seeds = self.data, self._seeds(self.newest.round)
        preparing = self.trainer.preparing(self.state.theta, self.state.received, data.train_x, data.train_y, seeds)
        own_tensors = alone(quietly(self.private, preparing, {name: self.state.theta[name] for name in self.part_of}))
        names = self.newest.weights or {self.evaluation.own_choice: 1.0}
        return {name: self.orders.beside(self.newest, KEPT.format(name)) or own_tensors for name in names}

    def _seeds(self, round_: int) -> Seeds:
        return lambda purpose: derive(self.plan.seed, self.name, round_, purpose)


def make_learner(
    plan: Plan, shard: LazyShard, name: str, orders: Callable[[str], OrderStore], options: DeviceOptions
) -> Learner:
    """Make the learner of a device.

    Raises:
        ShapeMismatch, UndeclaredLabels: The shard does not fit the plan.
        SettingError: The model or the method cannot be built here.
        HomeMismatch: The stored orders are damaged.
    """
    # torch counts threads for each thread that computes, so this must be called on the worker's.
    hardware.set_threads(options.threads)
    device = hardware.choose(options.device)
    prepared = prepare(shard.load_for(plan), plan)
    private = private_learning(plan, options, name, shard.digest, len(prepared.train_x), prepared.train_groups)
    tells, store = Gate(options, plan).tells_scores, orders(name)
    source = EmbeddingSource(None if options.simulated else store.secret, options.limits.model_bytes)
    keep, local, alone = options.keep, options.trains_local(plan), not options.against_alone(plan)
    return Learner(plan, prepared, name, store, device, keep, local, options.hooks, private, tells, source, alone)
