"""Interface of a device's local algorithm: what it gets, what it must offer, the model as a function of tensors, the loss.

N samples, B of a batch, D the head's inputs, C classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import TypeVar

from attune.common.config import TrainSettings
from attune.common.errors import SettingError
from attune.common.methods.settings.objectives import ObjectiveSettings
from attune.common.models.body import names_of, training_mode
from attune.common.models.structure import head_of, roles, tensors_of
from attune.common.models.usable import logits_of
from attune.common.torch_state import drawing, may_draw
from attune.fedclient.work.executor import Jobs, alone
from attune.fedclient.work.measures import MEASURES, Measure

if TYPE_CHECKING:
    from attune.fedclient.work.private.noisy_steps import OrderNoise

_ONE_SAMPLE = "more than 1 value per channel"  # in torch's message


class Network:
    """The architecture alone: every call is given the tensors to compute with, under the model's own names or more.

    Args:
        model: The module.
        vocabulary: Number of tokens; 0 if it does not take tokens, or not known.
    """

    def __init__(self, model: nn.Module, vocabulary: int = 0) -> None:
        self.model, self.vocabulary = model, vocabulary
        self.names = frozenset(tensors_of(model))
        self.still = names_of(model)  # its frozen body
        self.parameters = frozenset(name for name, _ in model.named_parameters())
        self._draws = may_draw(model)
        self.trainable = frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)

    def __call__(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return logits (B, ..., C). In training mode running statistics among `tensors` are updated in place.

        A frozen body need not be among them: then the model's own is used.
        """
        model_tensors = {name: tensor for name, tensor in tensors.items() if name in self.names or name in self.still}
        try:
            # A copy: a model may change its input in place, and it must not change the samples.
            with drawing(self._draws):
                output = functional_call(self.model, model_tensors, (x.clone(),))
        except ValueError as error:
            if _ONE_SAMPLE not in str(error):
                raise
            raise SettingError(
                "a batch of one sample cannot pass a batch normalisation: set train.batch_size to 2 or more. A device with a "
                "single training sample cannot train this model"
            ) from error
        return logits_of(output, self.model)

    def train(self, still: Callable[[str], bool]) -> None:
        """Switch to training mode, except for normalisation layers with statistics in `still`, which normalise with these."""
        training_mode(self.model)
        for name in sorted(self.names - self.parameters):
            if "norm" in self.roles[name] and still(name):
                self.model.get_submodule(name.rpartition(".")[0]).training = False

    @cached_property
    def normalises_batches(self) -> bool:
        """True if a layer normalises by the samples of a batch, so that training needs two of them."""
        return any(isinstance(module, _BatchNorm) for module in self.model.modules())

    def with_features(self, tensors: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (logits (B, ..., C), features (B, ..., D)). Features are what enters the head.

        Raises:
            SettingError: The model computes its logits without calling the head's module.
        """
        seen: list[Tensor] = []
        handle = self.model.get_submodule(self.head).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            logits = self(tensors, x)
        finally:
            handle.remove()
        if not seen:
            raise SettingError(f"the model {type(self.model).__name__} never calls its head {self.head!r}: take another method")
        return logits, seen[-1]

    @cached_property
    def roles(self) -> dict[str, frozenset[str]]:
        """Roles of each tensor, as in common.models.structure."""
        return roles(self.model)

    @cached_property
    def head(self) -> str:
        """Path of the classifier head, a Linear.

        Raises:
            SettingError: The model has none.
        """
        if head := head_of(self.roles):
            return head
        raise SettingError(f"the model {type(self.model).__name__} has no linear head: choose another model or method")


Tensors = dict[str, torch.Tensor]
OnProgress = Callable[[float], None]

S = TypeVar("S", bound=ObjectiveSettings, default=Any)

PERSONAL = "personal."  # tensors named so are a device's own, beside the model's, and never leave it


class Batch(NamedTuple):
    """Samples of one device for one step."""

    x: torch.Tensor  # (B, ...)
    y: torch.Tensor  # (B, ...) int64, or (B, K) float32: fedclient.work.measures
    weight: torch.Tensor | None = None  # (B,): how much each counts in a mean, summing to 1; None: all alike


# (tensors, beside, batch) -> scalar. It reads nothing else of a device, so that it can be mapped over many devices.
Loss = Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor], Batch], torch.Tensor]


@dataclass(frozen=True)
class Trained:
    """Result of local training."""

    tensors: Tensors
    loss: float  # sample-weighted mean over the last epoch, or over all local steps
    beside: Mapping[str, torch.Tensor] = field(default_factory=dict)  # the tensors beside, after a descent that changes them
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)  # what a user's loop keeps for the next order


@dataclass(frozen=True)
class LocalTask:
    """One device's work in one order. Nothing in it is modified but `state`; all tensors of the model lie on `device`."""

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
    progress: OnProgress = lambda done: None
    cancelled: Callable[[], bool] = lambda: False
    round: int = 0  # of the federation, that this work is for
    measure: Measure = MEASURES["classes"]  # of the task
    family: Hashable = None  # equal for devices that differ only in tensors, samples and seeds; None: not stacked
    noise: OrderNoise | None = None  # None: training is not private
    name: str = ""  # of the device
    state: dict[str, Any] = field(default_factory=dict)  # what a user's loop keeps for the next order; it changes this copy
    fold: torch.Tensor | None = None  # of each training sample, (N,), or -1; None: too few samples, or not asked for

    def takes(self, name: str, is_own: bool = False) -> bool:
        """Return whether this tensor may move.

        A tensor of the device beside the model's moves with the kind that it stands beside, and with "personal".

        Args:
            name: The tensor's name in the model.
            is_own: It is the device's own tensor under that name.
        """
        is_own, name = is_own or name.startswith(PERSONAL), name.removeprefix(PERSONAL)
        return not self.trains or self.kinds.get(name) in self.trains or (is_own and "personal" in self.trains)

    def movable(self, tensors: Mapping[str, torch.Tensor], is_own: bool = False) -> list[str]:
        """Return the names of the tensors that can be trained and may move. `is_own` is as in `takes`.

        An extra that stands beside no tensor of the model can be trained.
        """
        able, names = self.network.trainable, self.network.names

        def learned(name: str) -> bool:
            base = name.removeprefix(PERSONAL)
            return base in able or (base != name and base not in names)

        moved = [name for name in tensors if name in able or learned(name)]
        return [name for name in moved if self.takes(name, is_own)] if self.trains else moved

    def mean_loss(
        self, tensors: Mapping[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the mean loss f_i of a mini-batch."""
        return self.measure.loss(self.network(tensors, x), y, weight)

    def plain(self, tensors: Mapping[str, torch.Tensor], _: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """Return `mean_loss` with the arguments of a Loss."""
        return self.mean_loss(tensors, *batch)

    def class_counts(self, classes: int) -> torch.Tensor:
        """Return how often each label occurs in the training samples, (C,) int64 on the CPU."""
        return torch.bincount(self.y.flatten(), minlength=classes).cpu()


class Objective(ABC, Generic[S]):
    """A device's local algorithm. Constructed with its settings."""

    keeps_received = False  # whether `received` must survive a restart
    by_itself: ClassVar[str] = ""  # why devices cannot be trained together with it; empty: they can
    hands_in: ClassVar[Mapping[str, str]] = {}  # name in the update -> the device's tensor; empty: the part's own tensors

    def __init__(self, settings: S) -> None:
        self._settings = settings

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._settings})"

    def extras(self, tensors: Mapping[str, torch.Tensor], network: Network) -> Tensors:
        """Return further tensors that the device keeps: `personal.` and the name of the tensor that they stand beside.

        What follows `personal.` may also be no tensor's name: a number that the objective learns.

        Args:
            tensors: The model that the device is first served.
            network: The network.
        """
        return {}

    def handed_in(self, tensors: Mapping[str, torch.Tensor]) -> tuple[Tensors, bool]:
        """Return what the device hands in by `hands_in`, and whether it tells of its samples whatever the server served.

        Args:
            tensors: Those of the device after its work.
        """
        return {name: tensors[kept] for name, kept in self.hands_in.items()}, False

    @abstractmethod
    def work(self, task: LocalTask) -> Jobs[Trained]:
        """Train locally, and return every tensor of `task.start` afterwards.

        Raises:
            TrainingDiverged: The loss or a tensor is not finite.
            Cancelled: The work was replaced.
        """

    def run(self, task: LocalTask) -> Trained:
        """Run `work` on one device by itself, and return its result."""
        return alone(self.work(task))


def extras_of(objective: Objective, tensors: Mapping[str, torch.Tensor], network: Network) -> Tensors:
    """Return the objective's extras, checked.

    Raises:
        SettingError: A name of the model could be taken for an extra.
    """
    extras = objective.extras(tensors, network)
    clash = next((name for name in sorted(network.names, reverse=True) if name.startswith(PERSONAL)), None)
    if extras and clash:
        raise SettingError(f"the model's tensor {clash} is named like one that a device keeps: rename it in the model")
    return extras


def split(tensors: Mapping[str, torch.Tensor]) -> tuple[Tensors, Tensors]:
    """Return (the model's tensors, the device's own by the names of those that they stand beside)."""
    model = {name: tensor for name, tensor in tensors.items() if not name.startswith(PERSONAL)}
    return model, {name.removeprefix(PERSONAL): tensor for name, tensor in tensors.items() if name not in model}


def personal(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Return the same tensors under the names of a device's own."""
    return {PERSONAL + name: tensor for name, tensor in tensors.items()}
