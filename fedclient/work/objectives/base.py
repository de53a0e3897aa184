"""What a device's local algorithm is given and must offer, and the loss that all of them start from.

N samples, C classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch

from attune.common.config import TrainSettings
from attune.common.errors import SettingError
from attune.fedclient.work.job import Jobs, alone
from attune.fedclient.work.measures import MEASURES, Measure
from attune.fedclient.work.objectives.network import Network

Tensors = dict[str, torch.Tensor]
Forward = Callable[[Mapping[str, torch.Tensor], torch.Tensor], torch.Tensor]  # (tensors, x) -> logits (N, ..., C)
Progress = Callable[[float], None]

PERSONAL = "personal."  # tensors named so are a device's own, beside the model's, and never leave it


class Batch(NamedTuple):
    """Samples of one device for one step."""

    x: torch.Tensor  # (B, ...)
    y: torch.Tensor  # (B, ...) int64, or (B, K) float32: fedclient.work.measures
    weight: torch.Tensor | None = None  # (B,): how much each counts in a mean, summing to 1; None: all alike


# (tensors, what else the device has for it, batch) -> scalar. It sees nothing of a device but these, so that it serves many.
Loss = Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor], Batch], torch.Tensor]


@dataclass(frozen=True)
class Trained:
    tensors: Tensors
    loss: float  # sample-weighted mean over the last epoch, or over all local steps
    beside: Mapping[str, torch.Tensor] = field(default_factory=dict)  # of a descent that changes them: what they became


@dataclass(frozen=True)
class LocalTask:
    """One device's work in one order. Nothing in it is modified; all tensors of the model lie on `device`."""

    network: Network
    start: Tensors  # every tensor of the model, and the objective's extras
    received: Tensors  # what the server last served of the tensors that are not private
    x: torch.Tensor  # (N, ...) training samples, on the device or elsewhere
    y: torch.Tensor  # (N, ...) int64, or (N, K) float32
    settings: TrainSettings
    seeds: Callable[[str], int]  # purpose -> seed, of this device and round
    device: torch.device
    kinds: Mapping[str, str] = field(default_factory=dict)  # tensor -> shared, attended, generated or private
    trains: frozenset[str] = frozenset()  # the kinds that may move, "personal" for the objective's extras; empty: all
    progress: Progress = lambda done: None
    cancelled: Callable[[], bool] = lambda: False
    round: int = 0  # of the federation, that this work is for
    measure: Measure = MEASURES["classes"]  # of the task
    family: Hashable = None  # equal for devices that compute alike but for tensors, samples and seeds; None: for this one alone

    def takes(self, name: str, own: bool = False) -> bool:
        """Whether this tensor may move. own: it is the device's own under the model's name.

        A device's own tensor moves with the kind that it stands beside, and with "personal".
        """
        own, name = own or name.startswith(PERSONAL), name.removeprefix(PERSONAL)
        return not self.trains or self.kinds.get(name) in self.trains or (own and "personal" in self.trains)

    def movable(self, tensors: Mapping[str, torch.Tensor], own: bool = False) -> list[str]:
        """The names of those tensors that can be trained and may move. own: as for `takes`."""
        trainable = self.network.trainable
        return [name for name in tensors if name.removeprefix(PERSONAL) in trainable and self.takes(name, own)]

    def mean_loss(
        self, tensors: Mapping[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor | None = None
    ) -> torch.Tensor:
        """f_i: the mean loss of a mini-batch."""
        return self.measure.loss(self.network(tensors, x), y, weight)

    def plain(self, tensors: Mapping[str, torch.Tensor], _: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """`mean_loss` as a Loss."""
        return self.mean_loss(tensors, *batch)

    def class_counts(self, classes: int) -> torch.Tensor:
        """(C,) int64 on the CPU: how often each label occurs in the training samples."""
        return torch.bincount(self.y.flatten(), minlength=classes).cpu()


class Objective(ABC):
    """A device's local algorithm. Constructed with its settings."""

    keeps_received = False  # whether `received` must survive a restart
    by_itself: ClassVar[str] = ""  # why devices cannot be trained together with it; empty: they can

    def extras(self, tensors: Mapping[str, torch.Tensor], network: Network) -> Tensors:
        """Further tensors that the device keeps: `personal.` + the name of what they stand beside.

        tensors: the model that the device is first served.
        """
        return {}

    @abstractmethod
    def work(self, task: LocalTask) -> Jobs[Trained]:
        """Every tensor of `task.start` after local training. Errors: TrainingDiverged, Cancelled."""

    def run(self, task: LocalTask) -> Trained:
        """What `work` comes to, by itself."""
        return alone(self.work(task))


def extras_of(objective: Objective, tensors: Mapping[str, torch.Tensor], network: Network) -> Tensors:
    """The objective's extras, checked. Errors: SettingError for a model whose own names could be taken for extras."""
    extras = objective.extras(tensors, network)
    clash = next((name for name in sorted(network.names, reverse=True) if name.startswith(PERSONAL)), None)
    if extras and clash:
        raise SettingError(f"the model's tensor {clash} is named like one that a device keeps: rename it in the model")
    return extras


def split(tensors: Mapping[str, torch.Tensor]) -> tuple[Tensors, Tensors]:
    """(the model's tensors, the device's own by the names of those that they stand beside)."""
    model = {name: tensor for name, tensor in tensors.items() if not name.startswith(PERSONAL)}
    return model, {name.removeprefix(PERSONAL): tensor for name, tensor in tensors.items() if name not in model}


def personal(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """The same tensors under the names of a device's own."""
    return {PERSONAL + name: tensor for name, tensor in tensors.items()}
