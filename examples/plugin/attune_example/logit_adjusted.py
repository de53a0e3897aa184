"""Logit adjustment: Menon, Jayasumana, Rawat, Jain, Veit, Kumar, "Long-tail Learning via Logit Adjustment", ICLR 2021.

Devices train the model as if all classes were equally frequent on each of them, so that one model suits all. When it predicts,
each device takes the frequencies of the classes in its own data into account.

B samples of a batch, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from attune.plugin import (
    Batch,
    Descent,
    Jobs,
    LocalTask,
    Network,
    Objective,
    Predictor,
    Tensors,
    Trained,
    mean_cross_entropy,
    split,
)  # fmt: skip
from attune_example.settings import LogitAdjustedSettings, WithPriorSettings

PRIOR = "prior"


class LogitAdjusted(Objective[LogitAdjustedSettings]):
    """Cross-entropy of f(x) + strength * log pi, pi the shares of the classes on this device (equation 10)."""

    def work(self, task: LocalTask) -> Jobs[Trained]:
        """Train on the adjusted loss. The prior goes beside the tensors, so that many devices can be trained at once."""

        def loss(tensors: Mapping[str, torch.Tensor], beside: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
            adjusted_BC = task.network(tensors, batch.x) + beside[PRIOR]
            return mean_cross_entropy(adjusted_BC, batch.y, batch.weight)

        prior_C = self._settings.strength * log_prior(task)
        trained: Trained = yield Descent(task, task.settings, task.start, loss, {PRIOR: prior_C})
        return trained


class WithPrior(Predictor[WithPriorSettings]):
    """f(x) + strength * log pi: the adjustment that training left out."""

    def prepare(self, task: LocalTask) -> Tensors:
        """Return the model's tensors and the adjustment (C,); both are saved with the finished model."""
        return split(task.start)[0] | {PRIOR: self._settings.strength * log_prior(task)}

    def logits(self, network: Network, tensors: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return network(tensors, x) + tensors[PRIOR]


def log_prior(task: LocalTask) -> torch.Tensor:
    """Return the log of each class's share of the training samples, (C,); one more sample of each keeps it finite."""
    head_CD = task.start[f"{task.network.head}.weight"]
    counts_C = task.class_counts(len(head_CD)) + 1
    return (counts_C.double() / counts_C.sum()).log().to(head_CD)
