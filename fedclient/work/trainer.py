"""Local training and evaluation of one model on one device: tensors in, tensors and numbers out; no network, no files.

Shapes: N samples, C classes; a batch has B samples. Samples may lie on the trainer's device or be moved batch by batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor, nn

from attune.common.config import TrainSettings
from attune.fedclient.options import NONE, Hooks
from attune.fedclient.work.calibration import Calibrated, calibrated, sharpened
from attune.fedclient.work.executor import Jobs, alone
from attune.fedclient.work.measures import MEASURES, Measure, mean_score
from attune.fedclient.work.objectives.base import (
    PERSONAL,
    LocalTask,
    Network,
    Objective,
    OnProgress,
    Tensors,
    Trained,
    extras_of,
)
from attune.fedclient.work.objectives.descent import autocast
from attune.fedclient.work.own_loop import Data, scored, with_loop
from attune.fedclient.work.predictors.base import PlainPredictor, Predictor
from attune.fedclient.work.private.noisy_steps import OrderNoise

Named = Mapping[str, Tensor]  # tensors by name
EVALUATION_BATCH = 512
T = TypeVar("T")

Seeds = Callable[[str], int]  # purpose -> seed, in one order


class Scores(msgspec.Struct, frozen=True):
    """The scores that prepared tensors give to samples x (N, ...): (index, logits) of each batch, as `Trainer.logits`."""

    trainer: Trainer
    prepared: Mapping[str, Tensor]
    x: Tensor

    def alone(self) -> Iterator[tuple[int, Tensor]]:
        return self.trainer.logits(self.prepared, self.x)


class Accuracy(msgspec.Struct, frozen=True):
    """The mean score of prepared tensors on x (N, ...), y (N, ...), as `Trainer.evaluate`."""

    trainer: Trainer
    prepared: Mapping[str, Tensor]
    x: Tensor
    y: Tensor

    def alone(self) -> float:
        return self.trainer.evaluate(self.prepared, self.x, self.y)


@dataclass(eq=False, repr=False)
class Trainer:
    """Training and evaluation of weights that are given by name; the module only says how to compute.

    Work is a generator of jobs, which `fedclient.work.executor.alone` runs for one device.

    Args:
        model: The module, which is moved to `device`; or a network that is there.
        settings: Settings from the plan.
        kinds: The part of each tensor.
        family: Is equal for trainers that differ in nothing (LocalTask).
        hooks: A user's own training and scores.
        classes: The meaning of the numbers in labels.
        measure: Measure of the task.
        name: The device's name.
        state: What the user's own training keeps from order to order. Training works on a copy.
        fold: Same as in LocalTask.
    """

    model: InitVar[nn.Module | Network]
    objective: Objective
    predictor: Predictor
    settings: TrainSettings
    device: torch.device
    kinds: Mapping[str, str] = field(default_factory=dict)
    family: Hashable = None
    hooks: Hooks = NONE
    classes: Sequence[int | str] = ()
    measure: Measure = MEASURES["classes"]
    name: str = ""
    state: Mapping[str, Tensor] = field(default_factory=dict)
    fold: Tensor | None = None
    network: Network = field(init=False)

    def __post_init__(self, model: nn.Module | Network) -> None:
        self.network = model if isinstance(model, Network) else Network(model.to(self.device))

    def extras(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """Return what this device keeps beside the model before its first order.

        Raises:
            SettingError: The model does not fit the objective.
        """
        return extras_of(self.objective, tensors, self.network)

    def training(
        self,
        start: Mapping[str, Tensor],
        received: Mapping[str, Tensor],
        x: Tensor,
        y: Tensor,
        seeds: Seeds,
        progress: OnProgress = lambda done: None,
        cancelled: Callable[[], bool] = lambda: False,
        trains: Collection[str] = (),
        round_: int = 0,
        noise: OrderNoise | None = None,
    ) -> Jobs[Trained]:
        """Train from `start` on x (N, ...), y (N,) or (N, T), and return the tensors on the CPU.

        Args:
            start: The tensors to start from.
            received: Served tensors, by name.
            x: Samples.
            y: Labels.
            seeds: Values on which the seeds depend.
            progress: Is called with the share of the work.
            cancelled: Returns whether the work was replaced.
            trains: The kinds of tensors that may move; the others return bit for bit. Empty: all.
            round_: The federation's round.
            noise: The noise of this order; None: training is not private.

        Raises:
            TrainingDiverged: The loss or a tensor is not finite.
            Cancelled: The work was replaced.
        """
        task = self._task(
            start, received, x, y, seeds, round_, trains=frozenset(trains), progress=progress, cancelled=cancelled, noise=noise
        )
        trained = yield from self._looped(self.objective.work(task))
        taken = [name for name in start if task.takes(name)] if task.trains else start
        tensors = {**start, **{name: trained.tensors[name].cpu() for name in taken}}
        return Trained(tensors, trained.loss, state=task.state)

    def preparing(
        self,
        tensors: Mapping[str, Tensor],
        received: Mapping[str, Tensor],
        x: Tensor,
        y: Tensor,
        seeds: Seeds,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Jobs[Tensors]:
        """Return the tensors with which the device predicts. Arguments are those of `training`."""
        if type(self.predictor).prepare is PlainPredictor.prepare and self.hooks.train is None:
            return {name: tensor for name, tensor in tensors.items() if not name.startswith(PERSONAL)}
        task = self._task(tensors, received, x, y, seeds, cancelled=cancelled)
        prepared = yield from self._looped(self.predictor.work(task))
        return {name: tensor if tensor.is_cpu else tensor.cpu() for name, tensor in prepared.items()}

    def out_of_fold(
        self, tensors: Mapping[str, Tensor], received: Mapping[str, Tensor], x: Tensor, y: Tensor, seeds: Seeds
    ) -> Jobs[Tensor]:
        """Return scores (N, C) of training samples by models without each one's fold. Arguments are those of `training`."""
        yield from ()
        return self.predictor.out_of_fold(self._task(tensors, received, x, y, seeds)).cpu()

    def evaluate(self, prepared: Mapping[str, Tensor], x: Tensor, y: Tensor) -> float:
        """Return the mean score of prepared tensors on x (N, ...), y (N,), or over all positions for y (N, T)."""
        return mean_score(alone(self.right(prepared, x, y)))

    def accuracy(self, prepared: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Jobs[float]:
        """Return `evaluate` as a generator, which stops at what many devices can compute together."""
        if self.hooks.evaluate is not None or self.measure.one_score:
            return self.evaluate(prepared, x, y)
        accuracy: float = yield Accuracy(self, prepared, x, y)
        return accuracy

    def _looped(self, work: Jobs[T]) -> Jobs[T]:
        return work if self.hooks.train is None else with_loop(work, self.hooks.train, self.classes)

    def right(self, prepared: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Jobs[Tensor]:
        """Return which labels of y (N,) or (N, T) prepared tensors predict from x (N, ...): bool, in y's shape, on the CPU.

        In regression, and with a user's scores, it is the score of each sample, (N,), at most 1; in survival the C-index, (1,).
        """
        if self.hooks.evaluate is not None:
            tensors = self._on_device(prepared)
            return scored(self.hooks.evaluate, lambda some: self.scores(tensors, some), Data(x, y, self.classes))
        answers = []
        scores: Iterable[tuple[int, Tensor]] = yield Scores(self, prepared, x)
        for at, logits in scores:
            self.measure.check(logits, y[at : at + len(logits)])
            answers.append(self.measure.of_scores(logits))
        return self.measure.right(torch.cat(answers), y.to(self.device)).cpu()

    def calibrated(
        self, prepared: Mapping[str, Tensor], x: Tensor, y: Tensor, weight: Tensor | None = None
    ) -> Jobs[Calibrated]:
        """Calibrate prepared tensors on x (N, ...), and return how likely y is by them then, in y's shape, on the CPU."""
        return calibrated(self.measure.sharpnesses, (yield from self.likelihoods(prepared, x, y)), weight)

    def likelihoods(self, prepared: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Jobs[Tensor]:
        """Return how likely y is for x (N, ...) with each of the measure's sharpnesses, (G, *y.shape), on the CPU.

        For numbers it is a density.
        """
        pieces, sharpnesses = [], self.measure.sharpnesses
        scores: Iterable[tuple[int, Tensor]] = yield Scores(self, prepared, x)
        for at, logits in scores:
            some_y = y[at : at + len(logits)].to(self.device)
            self.measure.check(logits, some_y)
            pieces.append(torch.cat([self.measure.evidence(scaled, some_y) for scaled in sharpened(logits, sharpnesses)]))
        return self.measure.likelihood(torch.cat(pieces, dim=1)).cpu()

    def logits(self, prepared: Mapping[str, Tensor], x: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (index, logits (B, C) or (B, T, C)) for each batch of x (N, ...), without gradients."""
        tensors = self._on_device(prepared)
        for at in range(0, len(x), EVALUATION_BATCH):
            yield at, self.scores(tensors, x[at : at + EVALUATION_BATCH])

    def network_logits(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return logits of the network with these tensors as they are, without what a predictor does: x (N, ...)."""
        placed, pieces = self._on_device({name: tensors[name] for name in self.kinds}), []
        self.network.model.eval()
        with torch.no_grad():
            for at in range(0, len(x), EVALUATION_BATCH):
                pieces.append(self.network(placed, x[at : at + EVALUATION_BATCH].to(self.device)))
        return torch.cat(pieces)

    def scores(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return logits (B, C) or (B, T, C) of one batch x (B, ...), without gradients.

        The tensors are prepared and in place.
        """
        self.network.model.eval()
        with torch.no_grad(), autocast(self.device, self.settings):
            return self.predictor.logits(self.network, tensors, x.to(self.device))

    def _task(
        self, start: Named, received: Named, x: Tensor, y: Tensor, seeds: Seeds, round_: int = 0, **more: Any
    ) -> LocalTask:
        return LocalTask(
            network=self.network,
            start=self._on_device(start),
            received=self._on_device(received),
            x=x,
            y=y,
            settings=self.settings.in_round(round_),
            seeds=seeds,
            device=self.device,
            kinds=self.kinds,
            round=round_,
            measure=self.measure,
            family=self.family,
            name=self.name,
            state={name: tensor.clone() for name, tensor in self.state.items()},
            fold=self.fold,
            **more,
        )

    def _on_device(self, tensors: Mapping[str, Tensor]) -> Tensors:
        here = self.device.type == "cpu"  # as tensors between two orders are
        return dict(tensors) if here else {name: tensor.to(self.device) for name, tensor in tensors.items()}
