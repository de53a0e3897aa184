"""Objective with a generic and a personal head.

Chen, Chao, 'On Bridging Generic and Personalized Federated Learning for Image Classification', ICLR 2022 (FedRoD, with a linear
personal head).

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
from attune.fedclient.work.objectives.base import PERSONAL, Batch, LocalTask, Objective, Tensors, Trained, personal
from attune.fedclient.work.objectives.descent import Descent
from attune.fedclient.work.objectives.network import Network


class TwoHeads(Objective[TwoHeadsSettings]):
    """Balanced softmax for body and generic head, and the plain loss of both heads' sum for the personal head alone."""

    def extras(self, tensors: Mapping[str, Tensor], network: Network) -> Tensors:
        """Return the personal head, with zeros, so that an untrained device predicts with the generic head."""
        return personal({name: torch.zeros_like(tensors[name]) for name, of in network.roles.items() if "head" in of})

    def work(self, task: LocalTask) -> Jobs[Trained]:
        """Train both heads. The reported loss is the sum of both."""
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
    """Return the log of each class's share, (C,) float64.

    A class that the device lacks has -inf: it takes no part in the softmax, so its logit and its row of the head have no
    gradient. This is the limit of ever fewer samples.
    """
    return (counts_C.double() / counts_C.sum()).log()
