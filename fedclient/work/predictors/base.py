"""The interface of a predictor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch

from attune.fedclient.work.job import Jobs
from attune.fedclient.work.objectives.base import LocalTask, Tensors
from attune.fedclient.work.objectives.network import Network


class Predictor(ABC):
    """How a device scores classes. Constructed with its settings."""

    by_itself: ClassVar[str] = ""  # why devices cannot be evaluated together with it; empty: they can

    @abstractmethod
    def prepare(self, task: LocalTask) -> Tensors:
        """From what the device has (`task.start`, with its training samples) the tensors that it predicts with.

        They are also what a finished model is saved as, so that predicting needs neither training samples nor server. They need
        not be the model's alone. Errors: TrainingDiverged, Cancelled.
        """

    def work(self, task: LocalTask) -> Jobs[Tensors]:
        """`prepare`, which stops at what many devices can compute together."""
        yield from ()
        return self.prepare(task)

    def logits(self, network: Network, tensors: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """(N, ..., C) of prepared tensors: the largest is the prediction. Without gradients, in evaluation mode."""
        return network(tensors, x)
