"""A generic and a personal head: Chen, Chao, 'On Bridging Generic and Personalized Federated Learning for Image
Classification', ICLR 2022 (FedRoD, with a linear personal head).

B samples, C classes, D inputs of the head.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import linear

from attune.common.methods.settings.objectives import TwoHeadsSettings
from attune.fedclient.work.job import Jobs
from attune.fedclient.work.measures import mean_cross_entropy
from attune.fedclient.work.objectives.base import (
    PERSONAL,
    Batch,
    LocalTask,
    Objective,
    Tensors,
    Trained,
    personal,
)
from attune.fedclient.work.objectives.descent import Descent
from attune.fedclient.work.objectives.network import Network


class TwoHeads(Objective):
    """Balanced softmax for body and generic head, and the plain loss of both heads' sum for the personal head alone."""

    def __init__(self, settings: TwoHeadsSettings) -> None:
        self._settings = settings

    def __repr__(self) -> str:
        return "TwoHeads()"

    def extras(self, tensors: Mapping[str, Tensor], network: Network) -> Tensors:
        """The personal head, of zeros: a device that has not trained predicts with the generic head."""
        return personal({name: torch.zeros_like(tensors[name]) for name, of in network.roles.items() if "head" in of})

    def work(self, task: LocalTask) -> Jobs[Trained]:
        """The loss reported is the sum of both."""
        weight, bias = f"{PERSONAL}{task.network.head}.weight", f"{PERSONAL}{task.network.head}.bias"
        prior_C = log_prior(task.class_counts(len(task.start[weight]))).to(task.start[weight])

        def loss(tensors: Mapping[str, Tensor], beside: Mapping[str, Tensor], batch: Batch) -> Tensor:
            logits_BC, features_BD = task.network.with_features(tensors, batch.x)
            own_BC = linear(features_BD.detach(), tensors[weight], tensors.get(bias))
            generic = mean_cross_entropy(logits_BC + beside["prior"], batch.y, batch.weight)
            return generic + mean_cross_entropy(logits_BC.detach() + own_BC, batch.y, batch.weight)

        trained: Trained = yield Descent(task, task.settings, task.start, loss, {"prior": prior_C})
        return trained


def log_prior(counts_C: Tensor) -> Tensor:
    """(C,) float64: log of each class's share.

    A class that the device lacks gets -inf: it takes no part in the softmax, so neither its logit nor its row of the head has a
    gradient. The limit of ever fewer samples of it is the same.
    """
    return (counts_C.double() / counts_C.sum()).log()
