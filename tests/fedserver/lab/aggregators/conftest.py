"""A small part of a model, aggregators over it, and updates that a seed determines."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from attune_example.fedadam import FedAdam
from attune_example.settings import FedAdamSettings

from attune.common.exchange.transform import PartUpdate
from attune.common.methods.settings.aggregators import (
    AmpSettings,
    AttentionSettings,
    HandedInSettings,
    HeurAmpSettings,
    HypernetworkSettings,
    MeanSettings,
)
from attune.fedserver.lab.aggregators.attention import Amp, HeurAmp, Mcsa
from attune.fedserver.lab.aggregators.base import Aggregator, MemoryVault, Tensors, Vault
from attune.fedserver.lab.aggregators.hypernetwork import Hypernetwork
from attune.fedserver.lab.aggregators.mean import Mean
from attune.fedserver.lab.aggregators.mixing import HandedIn

COMPONENTS = {
    "blocks.0.qkv": ["blocks.0.qkv.weight"],
    "blocks.1.qkv": ["blocks.1.qkv.weight", "blocks.1.qkv.bias"],
    "token": ["token"],
    "scale": ["scale"],
}
SHAPES = {
    "blocks.0.qkv.weight": (6, 4),
    "blocks.1.qkv.weight": (6, 4),
    "blocks.1.qkv.bias": (6,),
    "token": (1, 2, 3),
    "scale": (),
}
SMALL = {"embedding_dim": 5, "hidden": 7}
KINDS: dict[str, Callable[[Vault], Aggregator]] = {
    "mean": lambda vault: Mean(MeanSettings(), vault, 3, COMPONENTS),
    "mean-uniform": lambda vault: Mean(MeanSettings(uniform=True), vault, 3, COMPONENTS),
    "mean-momentum": lambda vault: Mean(MeanSettings(shared_optimiser="momentum"), vault, 3, COMPONENTS),
    "mean-yogi": lambda vault: Mean(MeanSettings(shared_optimiser="yogi"), vault, 3, COMPONENTS),
    "median": lambda vault: Mean(MeanSettings(robust="median"), vault, 3, COMPONENTS),
    "trimmed-mean": lambda vault: Mean(MeanSettings(robust="trimmed-mean"), vault, 3, COMPONENTS),
    "multi-krum": lambda vault: Mean(MeanSettings(robust="multi-krum"), vault, 3, COMPONENTS),
    "fedadam": lambda vault: FedAdam(FedAdamSettings(), vault, 3, COMPONENTS),  # of examples/plugin
    "attention-limited": lambda vault: Mcsa(AttentionSettings(attention_cap=0.2, self_floor=0.5), vault, 3, COMPONENTS),
    "attention": lambda vault: Mcsa(AttentionSettings(), vault, 3, COMPONENTS),
    "attention-tensor-samples": lambda vault: Mcsa(
        AttentionSettings(components="tensor", weighting="samples"), vault, 3, COMPONENTS
    ),
    "heur-amp": lambda vault: HeurAmp(HeurAmpSettings(), vault, 3, COMPONENTS),
    "handed-in": lambda vault: HandedIn(HandedInSettings(), vault, 3, COMPONENTS),
    "amp": lambda vault: Amp(AmpSettings(), vault, 3, COMPONENTS),
    "amp-sigma-step": lambda vault: Amp(AmpSettings(sigma=2.0, step=0.5), vault, 3, COMPONENTS),
    "hypernetwork-adam": lambda vault: Hypernetwork(HypernetworkSettings(**SMALL), vault, 3, COMPONENTS),
    "hypernetwork-sgd": lambda vault: Hypernetwork(HypernetworkSettings(server_optimiser="sgd", **SMALL), vault, 3, COMPONENTS),
    "hypernetwork-plain-sgd": lambda vault: Hypernetwork(
        HypernetworkSettings(server_optimiser="sgd", server_momentum=0.0, **SMALL), vault, 3, COMPONENTS
    ),
    "hypernetwork-fixed": lambda vault: Hypernetwork(HypernetworkSettings(embedding="fixed", **SMALL), vault, 3, COMPONENTS),
}


def draw(seed: int, scale: float = 1.0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def served(aggregator: Aggregator, vault: Vault, client: str) -> Tensors:
    """Return the tensors that this client would be sent now."""
    aggregator.admit(client)
    slot = aggregator.slot(client)
    tensors: Mapping[str, torch.Tensor] = vault.read(slot) if slot else dict(aggregator.generate([client]))[client]
    return {name: tensors[name].clone() for name in SHAPES}


class Bench:
    """One aggregator with its vault. It plays rounds in which the updates depend on seed, round and client."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.vault = MemoryVault()
        self.reopen()
        self.aggregator.start(draw(0))

    def reopen(self) -> None:
        """Make a new aggregator over the same vault, as after a restart."""
        self.aggregator = KINDS[self.kind](self.vault)

    def play(self, number: int, samples: Mapping[str, int], zero: bool = False) -> dict[str, float]:
        return self.aggregator.close_round([self.update(number, client, m, zero) for client, m in samples.items()])

    def update(self, number: int, client: str, samples: int, zero: bool = False) -> PartUpdate:
        change = draw(1000 * number + sum(client.encode()), 0.0 if zero else 0.1)
        if not isinstance(self.aggregator, Hypernetwork):
            start = served(self.aggregator, self.vault, client)
            change = {name: start[name] + change[name] for name in SHAPES}
        return PartUpdate(client, samples, change)

    def state(self) -> dict[str, Tensors]:
        return {
            key: {name: self.vault.read(key)[name].clone() for name in self.vault.read(key)} for key in list(self.vault.keys())
        }

    def cold_start(self) -> Tensors:
        """Return the tensors that a device without a history is served."""
        found = self.aggregator.cold_start()
        tensors = self.vault.read(found) if isinstance(found, str) else found
        return {name: tensors[name].clone() for name in SHAPES}

    def served(self, client: str) -> Tensors:
        return served(self.aggregator, self.vault, client)


def same(one: Any, other: Any) -> bool:
    """Return whether both are bit-identical, through dictionaries."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)


@pytest.fixture(params=sorted(KINDS))
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(request.param)


@pytest.fixture
def new_bench() -> Callable[[str], Bench]:
    return Bench


@pytest.fixture
def identical() -> Callable[[Any, Any], bool]:
    return same


@pytest.fixture
def updates_of() -> Callable[[torch.Tensor, Sequence[float]], list[PartUpdate]]:
    """Return a function that makes updates of clients a, b, c ... with one tensor `x` from the rows of a matrix."""

    def make(X_SD: torch.Tensor, samples: Sequence[float]) -> list[PartUpdate]:
        return [PartUpdate(f"c{i:03}", m, {"x": row}) for i, (row, m) in enumerate(zip(X_SD, samples, strict=True))]

    return make
