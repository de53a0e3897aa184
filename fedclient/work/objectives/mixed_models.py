"""Objectives that mix the device's own model with the shared one.

Deng, Kamani, Mahdavi, 'Adaptive Personalized Federated Learning', 2020 (APFL, Algorithm 1).
Zhang et al., 'FedALA: Adaptive Local Aggregation for Personalized Federated Learning', AAAI 2023 (Algorithm 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from attune.common.config import TrainSettings
from attune.common.methods.settings.objectives import LocalAggregationSettings, MixtureSettings
from attune.common.seeds import derive
from attune.fedclient.work.executor import Jobs
from attune.fedclient.work.objectives.base import (
    PERSONAL,
    Batch,
    LocalTask,
    Network,
    Objective,
    Tensors,
    Trained,
    personal,
    split,
)
from attune.fedclient.work.objectives.descent import Descent

APART = f"{PERSONAL}apart."  # the own model v of APFL, by the model's names
SHARE = f"{PERSONAL}share"  # a of APFL, (1,)


class Mixture(Objective[MixtureSettings]):
    """Joint SGD on the shared model w, the own model v, and the share a of v in their mixture a v + (1 - a) w.

    The gradient of f_i at the mixture changes v and a, and w follows its own gradient alone.
    """

    def extras(self, tensors: Mapping[str, Tensor], network: Network) -> Tensors:
        """Return the mixture, v and a."""
        apart = {APART + name: tensor for name, tensor in tensors.items()}
        return personal(tensors) | apart | {SHARE: _scalar(tensors, self._settings.share)}

    def work(self, task: LocalTask) -> Jobs[Trained]:
        """Train w, v and a in the same steps. The reported loss is the sum of both models' losses."""
        model, _ = split(task.start)
        joint = {name: tensor for name, tensor in task.start.items() if name in model or name.startswith(APART)}
        mixes = frozenset(task.network.trainable)

        def mixture(tensors: Mapping[str, Tensor]) -> Tensors:
            share = tensors[SHARE]
            own_tensors = {name: tensors[APART + name] for name in model}
            mixed = {name: share * own_tensors[name] + (1 - share) * tensors[name].detach() for name in mixes & model.keys()}
            return own_tensors | mixed

        def loss(tensors: Mapping[str, Tensor], beside: Mapping[str, Tensor], batch: Batch) -> Tensor:
            shared = task.mean_loss({name: tensors[name] for name in model}, *batch)
            return shared + task.mean_loss(mixture(tensors), *batch)

        def follow(tensors: Mapping[str, Tensor], beside: Mapping[str, Tensor]) -> None:
            tensors[SHARE].clamp_(0, 1)

        start = joint | {SHARE: task.start[SHARE]}
        learned = {*mixes, *(APART + name for name in mixes), SHARE}  # running statistics follow their forward pass
        trained: Trained = yield Descent(
            task, task.settings, start, loss, names=learned, undecayed=frozenset({SHARE}), follow=follow
        )
        return Trained(trained.tensors | personal(mixture(trained.tensors)), trained.loss)


WEIGHT = f"{PERSONAL}weight."  # W of FedALA, by the names of the upper layers' tensors
ORDERS = f"{PERSONAL}orders"  # how many orders of training the device has carried out, (1,)
STEADY, LOOKED_AT, MOST_PASSES = 0.1, 10, 50  # W is found when the deviation of the last losses is below STEADY


class LocalAggregation(Objective[LocalAggregationSettings]):
    """SGD from own + W * (served - own) in the upper layers, and from what is served below, with a learned W in [0, 1]."""

    keeps_received = True

    def extras(self, tensors: Mapping[str, Tensor], network: Network) -> Tensors:
        """Return the own model, W and the count of orders."""
        weights = {WEIGHT + name: torch.ones_like(tensors[name]) for name in self._upper(network) if name in tensors}
        return personal(tensors) | weights | {ORDERS: _scalar(tensors, 0.0)}

    def _upper(self, network: Network) -> list[str]:
        """Return the trainable tensors of the last layers: modules with parameters of their own, in the model's order."""
        trainable = [name for name, _ in network.model.named_parameters() if name in network.trainable]
        layers = list(dict.fromkeys(name.rpartition(".")[0] for name in trainable))
        last = set(layers[-self._settings.layers :])
        return [name for name in trainable if name.rpartition(".")[0] in last]

    def work(self, task: LocalTask) -> Jobs[Trained]:
        """Learn W from the second order on, to the end in the second and by one pass later; then train all tensors."""
        model, own_tensors = split(task.start)
        orders = int(task.start[ORDERS])
        gaps = {
            name: task.received.get(name, model[name]) - own_tensors[name]
            for name in self._upper(task.network)
            if name in model and task.takes(name, is_own=True)
        }
        weights = {WEIGHT + name: task.start[WEIGHT + name] for name in gaps}
        if orders and gaps:
            weights = yield from self._learned(task, model, own_tensors, gaps, weights, MOST_PASSES if orders == 1 else 1)
        between = {name: own_tensors[name] + weights[WEIGHT + name] * gap for name, gap in gaps.items()}
        begun = model | (between if orders else {})
        trained: Trained = yield Descent(task, task.settings, begun, task.plain, is_own=True)
        handed_in = {name: trained.tensors[name] if task.takes(name) else tensor for name, tensor in model.items()}
        kept = {name: task.start[name] for name in task.start if name.startswith(WEIGHT)} | weights
        return Trained(handed_in | personal(trained.tensors) | kept | {ORDERS: task.start[ORDERS] + 1}, trained.loss)

    def _learned(
        self, task: LocalTask, model: Tensors, own_tensors: Tensors, gaps: Tensors, weights: Tensors, passes: int
    ) -> Jobs[Tensors]:
        """Return W after at most so many passes over a share of the samples."""
        settings = self._settings
        generator = torch.Generator().manual_seed(derive(task.seeds("local aggregation"), "samples"))
        count = max(1, round(settings.sampled * len(task.x)))
        index_N = torch.randperm(len(task.x), generator=generator)[:count].to(task.x.device)
        some = replace(task, x=task.x[index_N], y=task.y[index_N.to(task.y.device)], start=task.start | weights)
        step = TrainSettings(
            lr=settings.weight_lr, momentum=0.0, clip_norm=0.0, batch_size=task.settings.batch_size, local_epochs=1
        )

        def loss(tensors: Mapping[str, Tensor], beside: Mapping[str, Tensor], batch: Batch) -> Tensor:
            upper = {name: beside[f"own.{name}"] + tensors[WEIGHT + name] * beside[f"gap.{name}"] for name in gaps}
            return task.mean_loss({name: beside[name] for name in model} | upper, *batch)

        def follow(tensors: Mapping[str, Tensor], beside: Mapping[str, Tensor]) -> None:
            for name in gaps:
                tensors[WEIGHT + name].clamp_(0, 1)

        beside = (
            model | {f"own.{name}": own_tensors[name] for name in gaps} | {f"gap.{name}": gap for name, gap in gaps.items()}
        )
        losses: list[float] = []
        for number in range(passes):
            purpose = f"aggregation {number}"
            done: Trained = yield Descent(some, step, weights, loss, beside, purpose=purpose, follow=follow, share=(0.0, 0.0))
            weights = done.tensors
            losses.append(done.loss)
            if len(losses) > LOOKED_AT and float(torch.tensor(losses[-LOOKED_AT:]).std()) < STEADY:
                break
        return weights


def _scalar(tensors: Mapping[str, Tensor], value: float) -> Tensor:
    """Return a tensor (1,) in the precision of the model."""
    floating = next((tensor for tensor in tensors.values() if tensor.is_floating_point()), torch.zeros(1))
    return floating.new_tensor([value])
