"""The interface of a predictor, the simple ones, and the features and labels of a device's own training samples.

N samples, B of a batch, T labels of a sample (1, or one at every position), D features, C classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic

import msgspec
import torch
from typing_extensions import TypeVar

from attune.common.methods.settings.objectives import FineTuneSettings, PredictorSettings
from attune.fedclient.work.executor import Cancelled, Jobs, alone
from attune.fedclient.work.objectives.base import LocalTask, Network, Tensors, Trained, split
from attune.fedclient.work.objectives.descent import Descent
from attune.fedclient.work.objectives.two_heads import SHIFT

S = TypeVar("S", bound=PredictorSettings, default=Any)


class Predictor(ABC, Generic[S]):
    """How a device scores classes. Constructed with its settings."""

    by_itself: ClassVar[str] = ""  # why devices cannot be evaluated together with it; empty: they can
    scores_out_of_fold: ClassVar[bool] = False  # its training samples can be predicted without themselves

    def __init__(self, settings: S) -> None:
        self._settings = settings

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._settings})"

    @abstractmethod
    def prepare(self, task: LocalTask) -> Tensors:
        """Return the tensors that the device predicts with, from those that it has (`task.start`) and its training samples.

        A finished model is saved as these tensors, so that predicting needs neither training samples nor server. They may be
        more than the model's.

        Raises:
            TrainingDiverged: The predictor trains, and a tensor is not finite.
            Cancelled: The work was given up.
        """

    def work(self, task: LocalTask) -> Jobs[Tensors]:
        """Return `prepare` as a generator, which stops at what many devices can compute together."""
        yield from ()
        return self.prepare(task)

    def out_of_fold(self, task: LocalTask) -> torch.Tensor:
        """Return scores of the training samples by models without each sample's fold, (N, C); NaN in no fold."""
        raise NotImplementedError

    def logits(self, network: Network, tensors: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Return scores (N, ..., C) of x by prepared tensors; the largest is the prediction. No gradients, evaluation mode."""
        return network(tensors, x)


class PlainPredictor(Predictor[PredictorSettings]):
    """The trained model's own logits."""

    def prepare(self, task: LocalTask) -> Tensors:
        return split(task.start)[0]


class OwnModelPredictor(PlainPredictor):
    """The model that a device keeps beside the shared one (pFedMe's personal model, Ditto)."""

    def prepare(self, task: LocalTask) -> Tensors:
        model, own_tensors = split(task.start)
        return {name: own_tensors.get(name, tensor) for name, tensor in model.items()}


class TwoHeadsPredictor(PlainPredictor):
    """The sum of the generic and the personal head's logits (FedRoD).

    Both heads are linear in the same features, so one head with the sum of their weights has the sum of their logits.
    """

    def prepare(self, task: LocalTask) -> Tensors:
        model, own_tensors = split(task.start)
        return model | {name: model[name] + tensor for name, tensor in own_tensors.items()}


class DomainBiasPredictor(PlainPredictor):
    """The model with its features shifted by the device's own b (FedDBE).

    The head is linear, so the shift of its inputs is a change of its bias.
    """

    def prepare(self, task: LocalTask) -> Tensors:
        model, _ = split(task.start)
        weight, bias = f"{task.network.head}.weight", f"{task.network.head}.bias"
        return model | {bias: model[bias] + model[weight] @ task.start[SHIFT]}


class FineTune(Predictor[FineTuneSettings]):
    """theta after some plain SGD. The device only predicts with it; training goes on from theta."""

    def prepare(self, task: LocalTask) -> Tensors:
        return alone(self.work(task))

    def work(self, task: LocalTask) -> Jobs[Tensors]:
        settings = msgspec.structs.replace(
            task.settings,
            lr=self._settings.alpha or task.settings.lr,
            local_epochs=self._settings.tune_epochs,
            local_steps=self._settings.tune_steps,
        )
        tuned: Trained = yield Descent(task, settings, split(task.start)[0], task.plain, purpose="tune")
        return tuned.tensors


LABELS = "memory.labels"
BATCH = 512  # samples of one forward


def remember(
    task: LocalTask, model: Mapping[str, torch.Tensor], index_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return (features (N T, D) float32, labels (N T,)) of these training samples, on the task's processor.

    Features are what enters the head, without gradients, in evaluation mode. It is None without samples.

    Raises:
        Cancelled: The work was replaced.
    """
    features, labels = [], []
    task.network.model.eval()
    for index_B in torch.split(index_N, BATCH) if len(index_N) else ():
        if task.cancelled():
            raise Cancelled("this work was replaced")
        with torch.no_grad():
            _, features_BD = task.network.with_features(model, task.x[index_B.to(task.x.device)].to(task.device))
        features.append(features_BD.flatten(end_dim=-2).float())
        labels.append(task.y[index_B.to(task.y.device)].flatten().to(task.device))
    return (torch.cat(features), torch.cat(labels)) if features else None
