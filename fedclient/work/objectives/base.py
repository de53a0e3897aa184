"""What a device's local algorithm is given and must offer, and the loss that all of them start from.

N samples, C classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch.nn.functional import cross_entropy

from attune.common.config import TrainSettings
from attune.common.errors import SettingError
from attune.fedclient.work.objectives.network import Network

Tensors = dict[str, torch.Tensor]
Forward = Callable[[Mapping[str, torch.Tensor], torch.Tensor], torch.Tensor]  # (tensors, x) -> logits (N, ..., C)
Loss = Callable[[Mapping[str, torch.Tensor], torch.Tensor, torch.Tensor], torch.Tensor]  # (tensors, x, y) -> scalar
Progress = Callable[[float], None]

PERSONAL = "personal."  # tensors named so are a device's own, beside the model's, and never leave it


@dataclass(frozen=True)
class Trained:
    tensors: Tensors
    loss: float  # sample-weighted mean over the last epoch, or over all local steps


@dataclass(frozen=True)
class LocalTask:
    """One device's work in one order. Nothing in it is modified; all tensors of the model lie on `device`."""

    network: Network
    start: Tensors  # every tensor of the model, and the objective's extras
    received: Tensors  # what the server last served of the tensors that are not private
    x: torch.Tensor  # (N, ...) training samples, on the device or elsewhere
    y: torch.Tensor  # (N, ...) int64
    settings: TrainSettings
    seeds: Callable[[str], int]  # purpose -> seed, of this device and round
    device: torch.device
    kinds: Mapping[str, str] = field(default_factory=dict)  # tensor -> shared, attended, generated or private
    trains: frozenset[str] = frozenset()  # the kinds that may move, "personal" for the objective's extras; empty: all
    progress: Progress = lambda done: None
    cancelled: Callable[[], bool] = lambda: False

    def takes(self, name: str, own: bool = False) -> bool:
        """Whether this tensor may move. own: it is the device's own under the model's name.

        A device's own tensor moves with the kind that it stands beside, and with "personal".
        """
        own, name = own or name.startswith(PERSONAL), name.removeprefix(PERSONAL)
        return not self.trains or self.kinds.get(name) in self.trains or (own and "personal" in self.trains)

    def cross_entropy(self, tensors: Mapping[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """f_i: the mean loss of a mini-batch."""
        return mean_cross_entropy(self.network(tensors, x), y)

    def class_counts(self, classes: int) -> torch.Tensor:
        """(C,) int64 on the CPU: how often each label occurs in the training samples."""
        return torch.bincount(self.y.flatten(), minlength=classes).cpu()


class Objective(ABC):
    """A device's local algorithm. Constructed with its settings."""

    keeps_received = False  # whether `received` must survive a restart

    def extras(self, tensors: Mapping[str, torch.Tensor], network: Network) -> Tensors:
        """Further tensors that the device keeps: `personal.` + the name of what they stand beside.

        tensors: the model that the device is first served.
        """
        return {}

    @abstractmethod
    def run(self, task: LocalTask) -> Trained:
        """Every tensor of `task.start` after local training. Errors: TrainingDiverged, Cancelled."""


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


def mean_cross_entropy(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean over samples, and over positions where every position has a label: logits (N, ..., C), y (N, ...).

    Errors: SettingError as for `check_scores`.
    """
    check_scores(logits, y)
    return cross_entropy(logits.flatten(end_dim=-2), y.flatten())


def check_scores(logits: torch.Tensor, y: torch.Tensor) -> None:
    """Errors: SettingError unless logits (N, ..., C) score what y (N, ...) labels; only a model of one's own can fail this."""
    if logits.shape[:-1] != y.shape:
        raise SettingError(
            f"the model gives scores of shape {tuple(logits.shape)} for labels of shape {tuple(y.shape)}: they must agree "
            "but for a last axis of classes; change the model's factory (spec.per_position tells which labels there are)"
        )
