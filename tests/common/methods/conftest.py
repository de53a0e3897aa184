"""Small real models of the registry, and a federation of aggregators and objectives in one process, in float64."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from attune.common.config import TrainSettings
from attune.common.exchange.transform import PartUpdate
from attune.common.methods.method import Method, assign, configure
from attune.common.models.registry import build, default_spec
from attune.common.models.structure import tensors_of
from attune.common.seeds import derive
from attune.fedclient.work.build import objective_for, predictor_for
from attune.fedclient.work.objectives.base import LocalTask, Network, Tensors, extras_of
from attune.fedserver.lab.aggregators.base import MemoryVault
from attune.fedserver.lab.build import aggregators_for

Data = tuple[np.ndarray, np.ndarray]


def vit() -> nn.Module:
    return build(default_spec("images", (8, 8, 1), 10, 0, "vit", {}), seed=0)


def dnn() -> nn.Module:
    return build(default_spec("tabular", (6,), 3, 0, "dnn", {}), seed=0)


def transformer() -> nn.Module:
    return build(default_spec("tokens", (5,), 4, 9, "transformer", {}), seed=0)


@pytest.fixture
def models() -> dict[str, Callable[[], nn.Module]]:
    return {"vit": vit, "dnn": dnn, "transformer": transformer}


@dataclass
class Federation:
    """Devices `a`, `b`, ... over the real aggregators. A device's state is every tensor that it keeps."""

    method: Method
    model: nn.Module
    shards: Mapping[str, Data]
    options: Mapping[str, Any] = field(default_factory=dict)
    train: TrainSettings = field(default_factory=TrainSettings)

    def __post_init__(self) -> None:
        self.configured = configure(self.method, self.options)
        self.network = Network(self.model)
        self.kinds = assign(self.method, self.model)
        self.vaults = {kind: MemoryVault() for kind in set(self.kinds.values())}
        initial = tensors_of(self.model)
        self.aggregators = aggregators_for(self.configured, self.model, self.vaults.__getitem__, seed=0)
        for kind, aggregator in self.aggregators.items():
            aggregator.start({name: tensor for name, tensor in initial.items() if self.kinds[name] == kind})
            for client in sorted(self.shards):
                aggregator.admit(client)
        self.objective = objective_for(self.configured)
        self.predictor = predictor_for(self.configured)
        self.state: dict[str, Tensors] = {}
        for client in self.shards:
            first = initial | self.served(client)
            self.state[client] = first | extras_of(self.objective, first, self.network)
        self.losses: dict[str, float] = {}
        self.rounds = 0

    def served(self, client: str) -> Tensors:
        found: Tensors = {}
        for kind, aggregator in self.aggregators.items():
            slot = aggregator.slot(client)
            found |= dict(self.vaults[kind].read(slot) if slot else dict(aggregator.generate([client]))[client])
        return found

    def task(self, client: str) -> LocalTask:
        received = self.served(client)
        x, y = self.shards[client]
        return LocalTask(
            network=self.network,
            start=self.state[client] | received,
            received=received,
            x=torch.from_numpy(x),
            y=torch.from_numpy(y),
            settings=self.train,
            seeds=lambda purpose: derive(0, client, self.rounds, purpose),
            device=torch.device("cpu"),
            kinds=self.kinds,
        )

    def round(self) -> None:
        """Run a round: all devices train on what they are served, and the aggregators take their updates."""
        self.rounds += 1
        updates: dict[str, list[PartUpdate]] = {kind: [] for kind in self.aggregators}
        for client, (_, y) in self.shards.items():
            task = self.task(client)
            trained = self.objective.run(task)
            self.state[client], self.losses[client] = trained.tensors, trained.loss
            for kind in self.aggregators:
                names = [name for name, of in self.kinds.items() if of == kind]
                change = self.configured.aggregators[kind].returns == "change"
                handed_in = {n: trained.tensors[n] - task.received[n] if change else trained.tensors[n] for n in names}
                updates[kind].append(PartUpdate(client, float(len(y)), handed_in))
        for kind, aggregator in self.aggregators.items():
            aggregator.close_round(updates[kind])

    def prepared(self, client: str, served: bool = True) -> Tensors:
        """Return what the device predicts with: from what it is served, or from its own state."""
        task = self.task(client)
        if not served:
            task = LocalTask(**{**vars(task), "start": self.state[client]})
        return self.predictor.prepare(task)


@pytest.fixture
def federation() -> type[Federation]:
    return Federation
