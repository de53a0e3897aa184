"""A device's own embedding z, from which it generates a part of its model by the hypernetwork that the server sends.

FedTP (Li et al., IEEE TNNLS 2023, eq. 7-10, signs as in errata E2) divided between server and devices: a device computes
W = h(phi; z), trains, and hands in g = (dW/dphi)^T (-Delta). z never leaves it. Its own step z <- z - beta (m_i/M) dz needs M,
and whether g counted: the next order tells. Until then dz is kept with the order.

Shapes: E numbers of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
import torch
from torch import nn

from attune.common.errors import LimitExceeded
from attune.common.exchange.messages import Order
from attune.common.exchange.registry import secure_sum_in
from attune.common.methods.hypernetwork import (
    computes_in,
    generated,
    gradients,
    heads_of,
    off_wire,
    on_wire,
    optimiser_of,
    travelling,
)
from attune.common.methods.method import ConfiguredMethod, assign
from attune.common.methods.settings.aggregators import HypernetworkSettings
from attune.common.models.structure import components_by_part, tensors_of
from attune.common.plan import Plan
from attune.common.privacy.noise import NoiseStream, key_of
from attune.common.secure.secure_sum import ONE, weight_of
from attune.common.seeds import derive
from attune.common.wire.header import layout_of
from attune.common.wire.tensors import Tensors

PART: Literal["generated"] = "generated"


@dataclass(frozen=True)
class EmbeddingSource:
    """Conditions under which a device keeps an embedding.

    Attributes:
        secret: Returns 32 bytes that only this device knows; None: in a simulation the draw is that of plain FedTP.
        most_bytes: Largest network that the device accepts.
    """

    secret: Callable[[], bytes] | None = None
    most_bytes: int = 4 << 30


FROM_SEED = EmbeddingSource()


@dataclass(frozen=True)
class WaitingStep:
    """The step of an embedding that waits until the server tells whether the update counted.

    Attributes:
        gradient: dz, (E), without the device's share of the samples.
        round: The round of the update; 0: none waits.
        weight: The device's weight in it.
    """

    gradient: torch.Tensor
    round: int = 0
    weight: float = 0.0


@dataclass(frozen=True)
class Embedding:
    """A device's embedding after an order, and the network that was served with it.

    Attributes:
        value: z, (E).
        moments: Running tensors of its optimiser, each (E).
        steps: How many steps it has taken.
        waiting: The step that it may take next.
        network: phi, under the names of blobs; empty until it is served.
        generator: How it becomes weights.
    """

    value: torch.Tensor
    moments: tuple[torch.Tensor, ...]
    steps: int
    waiting: WaitingStep
    network: Tensors
    generator: Generator

    def tensors(self) -> Tensors:
        """Return all of it but the network as tensors, to be committed with an order."""
        numbers = torch.tensor([self.steps, self.waiting.round, self.waiting.weight], dtype=torch.float64)
        named = {f"moment.{k}": moment for k, moment in enumerate(self.moments)}
        return {"value": self.value, "waiting": self.waiting.gradient, "numbers": numbers} | named

    def restored(self, saved: Mapping[str, torch.Tensor]) -> Embedding:
        """Return the embedding from which `tensors` came."""
        steps, number, weight = saved["numbers"].tolist()
        moments = tuple(saved[f"moment.{k}"] for k in range(len(self.moments)))
        waiting = WaitingStep(saved["waiting"], int(number), weight)
        return replace(self, value=saved["value"], moments=moments, steps=int(steps), waiting=waiting)

    def after(self, order: Order, fetched: Mapping[str, Tensors]) -> Embedding:
        """Return the embedding with what an order tells and serves: the step that waited is taken if its update counted.

        Args:
            order: The order.
            fetched: Its blobs that were fetched, by digest.
        """
        network, number = self.network, self.waiting.round
        for ref in order.downloads:
            if ref.part == PART and ref.digest in fetched:  # copied, because bits of products may depend on how a tensor lies
                network = {name: tensor.clone() for name, tensor in fetched[ref.digest].items()}
        settled = replace(self, waiting=WaitingStep(torch.zeros_like(self.value)), network=network)
        if number not in order.counted:
            return settled
        share = min(1.0, self.waiting.weight / order.counted[number])
        value, moments = self.value.clone(), tuple(moment.clone() for moment in self.moments)
        self.generator.optimiser.dense_(value, self.waiting.gradient * share, moments, self.steps + 1)
        return replace(settled, value=value, moments=moments, steps=self.steps + 1)

    def weights(self) -> Tensors:
        """Return h(phi; z)."""
        return self.generator.weights(self.network, self.value)

    def common(self, network: Mapping[str, torch.Tensor]) -> Tensors:
        """Return h(phi; 0), the common model's weights."""
        copied = {name: tensor.clone() for name, tensor in network.items()}
        return self.generator.weights(copied, torch.zeros_like(self.value))

    def handed_in(self, theta: Tensors, received: Tensors, round_: int) -> tuple[Tensors, Embedding]:
        """Return the gradient of the network, and the embedding with a step that waits.

        Args:
            theta: The trained tensors, the generated ones among them.
            received: Those before training.
            round_: The round.
        """
        change = {name: (theta[name] - received[name]).cpu() for name in self.generator.initial}
        gradient, dz_E = gradients(off_wire(self.network), self.generator.heads, self.value, change)
        return on_wire(gradient), replace(self, waiting=WaitingStep(dz_E, round_, self.generator.weight))


class Generator:
    """How a device generates its weights.

    Args:
        settings: Of the hypernetwork.
        initial: The generated tensors of the model.
        components: Their names by component.
        weight: The weight of the device's update among others.
    """

    def __init__(
        self, settings: HypernetworkSettings, initial: Tensors, components: Mapping[str, list[str]], weight: float
    ) -> None:
        self.initial, self.weight, self.heads = initial, weight, heads_of(initial, components)
        self.manifest = travelling(settings, initial, components)
        self.optimiser = optimiser_of(msgspec.structs.replace(settings, server_lr=settings.z_lr))

    def weights(self, network: Mapping[str, torch.Tensor], z_E: torch.Tensor) -> Tensors:
        """Return h(phi; z) for one embedding."""
        with torch.no_grad():
            return generated(off_wire(network), self.heads, self.initial, z_E[None])[0]

    def started(self, value_E: torch.Tensor) -> Embedding:
        """Return an embedding that has not moved yet."""
        zeros_E = torch.zeros_like(value_E)
        return Embedding(value_E, tuple(zeros_E for _ in self.optimiser.moments), 0, WaitingStep(zeros_E), {}, self)


def embedding_of(
    configured: ConfiguredMethod, model: nn.Module, plan: Plan, name: str, samples: int, source: EmbeddingSource
) -> Embedding | None:
    """Return a device's first embedding, from N(0, 1); None if the server has the embeddings, or nothing is generated.

    Args:
        configured: The method.
        model: The model.
        plan: The plan.
        name: The device.
        samples: Its training samples.
        source: Where it is drawn from.

    Raises:
        SettingError: The hypernetwork is larger than the settings allow.
        LimitExceeded: It is larger than the device's owner allows.
    """
    settings = configured.aggregators.get(PART)
    if not isinstance(settings, HypernetworkSettings) or not settings.on_device:
        return None
    part_of, secure = assign(configured.method, model), secure_sum_in(plan.transforms)
    initial = {name: tensor.clone() for name, tensor in tensors_of(model).items() if part_of[name] == PART}
    weight = weight_of(secure, samples) / ONE if secure is not None else float(samples)
    generator = Generator(settings, initial, components_by_part(model, part_of)[PART], weight)
    if (size := layout_of(generator.manifest).size) > source.most_bytes:
        raise LimitExceeded(
            f"the server's hypernetwork has {size:,} bytes; this device allows {source.most_bytes:,} (--max-model-bytes)"
        )
    if source.secret is not None:
        value_E = NoiseStream(key_of(source.secret(), "embedding", plan.run)).normal(settings.embedding_dim)
    else:
        draw = torch.Generator().manual_seed(derive(plan.seed, "embedding", name))
        value_E = torch.randn(settings.embedding_dim, generator=draw, dtype=torch.float64)
    return generator.started(value_E.to(computes_in(initial)))
