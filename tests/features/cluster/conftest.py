"""Aggregators over vaults of blobs, in this process and on workers, for comparison."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from attune.common.exchange.transform import PartUpdate
from attune.common.methods.method import PartKind
from attune.common.methods.settings.aggregators import SETTINGS
from attune.features.cluster import server
from attune.features.cluster.cluster_carrier import ClusterCarrier
from attune.features.cluster.worker_pool import WorkerPool
from attune.fedserver.core.records import Slot
from attune.fedserver.lab.aggregators.base import IN_TURN
from attune.fedserver.lab.build import AggregatorSpec, made
from attune.fedserver.lab.vault import StateVault
from attune.fedserver.ports.blobs import Blobs
from attune.simulation.memory import MemoryBlobs
from tests.features.cluster.inline_cluster import InlineCluster

SHAPES = {"a.weight": (6, 4), "a.bias": (6,), "b.weight": (3, 2, 3), "count": (), "c.weight": (40, 30), "c.empty": (0, 3)}
COMPONENTS = {"a": ["a.weight", "a.bias"], "b": ["b.weight", "count"], "c": ["c.weight", "c.empty"]}
PARTS: dict[str, PartKind] = {"mean": "shared", "fedadam": "shared"}
Tensors = dict[str, torch.Tensor]


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mean": ("mean", {}),
    "mean, mixed": ("mean", {"server_mix": 0.3}),
    "median": ("mean", {"robust": "median"}),
    "trimmed mean": ("mean", {"robust": "trimmed-mean"}),
    "multi-krum": ("mean", {"robust": "multi-krum"}),
    "multi-krum, mixed": ("mean", {"robust": "multi-krum", "server_mix": 0.3}),
    "attention": ("attention", {}),
    "attention, limited": ("attention", {"attention_cap": 0.2, "self_floor": 0.5, "weighting": "samples"}),
    "attention by tensor": ("attention", {"components": "tensor"}),
    "heur-amp": ("heur-amp", {}),
    "amp": ("amp", {}),
}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Ray look installed: an inline cluster stands in for one."""
    monkeypatch.setattr(server, "find_spec", lambda name: sys.modules.get(name, object()))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return KINDS[request.param]


def draw(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return drawn | {"count": (100 * drawn["count"]).long(), "b.weight": drawn["b.weight"].bfloat16()}


def update(number: int, client: str, samples: float) -> PartUpdate:
    """Return a client's update in a round."""
    return PartUpdate(client, samples, draw(1000 * number + sum(client.encode())))


class Played:
    """One aggregator over a vault of blobs. `pool` carries out its rounds; None means this process does."""

    def __init__(
        self,
        aggregator: str,
        given: Mapping[str, Any],
        pool: WorkerPool | None = None,
        parcel_bytes: int = 100,
        components: Mapping[str, list[str]] = COMPONENTS,
        initial: Tensors | None = None,
        blobs: Blobs | None = None,
    ) -> None:
        self.part = PARTS.get(aggregator, "attended")
        self.spec = AggregatorSpec(self.part, aggregator, SETTINGS[aggregator](**given), 3, components)
        self.blobs: Blobs = blobs or MemoryBlobs()
        self.slots, self.version = dict[str, Slot](), 0
        self.pool, self.parcel_bytes = pool, parcel_bytes
        self.reopen()
        self.aggregator.start(draw(0) if initial is None else initial)
        self.commit()

    def reopen(self) -> None:
        """Open again, as after a restart, or after a round that was not committed."""
        self.vault = StateVault(self.blobs, self.part, list(self.slots.values()), self.version)
        carrier = IN_TURN if self.pool is None else ClusterCarrier(self.pool, self.spec, self.parcel_bytes)
        self.aggregator = made(self.spec, self.vault, carrier)

    def play(self, number: int, samples: Mapping[str, float]) -> dict[str, float]:
        return self.aggregator.close_round([update(number, name, m) for name, m in samples.items()])

    def served(self, client: str) -> Tensors:
        """Return the tensors served to a client with a slot."""
        slot = self.aggregator.slot(client)
        assert slot is not None
        return dict(self.vault.read(slot))

    def commit(self) -> list[str]:
        """Commit the staged state, and return the digests of all state."""
        staged = self.vault.staged_slots()
        self.slots |= {slot.key: slot for slot in staged}
        self.vault.settle()
        self.version += 1
        return [f"{slot.key} {slot.digest}" for slot in staged]


@pytest.fixture
def new_pool() -> Callable[..., tuple[WorkerPool, InlineCluster]]:
    def make(size: int, **more: Any) -> tuple[WorkerPool, InlineCluster]:
        cluster = InlineCluster(size, **more)
        return WorkerPool(cluster), cluster

    return make


def rounds() -> Sequence[Mapping[str, float]]:
    """Return cohorts that overlap, with a client without samples, and one cohort of a single client."""
    return [
        {"ann": 30, "bob": 10, "cyd": 60},
        {"ann": 5, "dot": 7, "eve": 0},
        {"cyd": 1},
        {"ann": 9, "bob": 2, "cyd": 3, "dot": 4},
    ]
