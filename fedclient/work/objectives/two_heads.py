"""Objectives about what enters the head: with a generic and a personal head, or a shift of the features for each device.

Chen, Chao, 'On Bridging Generic and Personalized Federated Learning for Image Classification', ICLR 2022 (FedRoD, with a
linear personal head).
Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan, 'Eliminating Domain Bias for Federated Learning in Representation Space',
NeurIPS 2023 (FedDBE).

B samples of a batch, C classes, D features, which are the inputs of the head.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import linear

from attune.common.methods.settings.objectives import DomainBiasSettings, TwoHeadsSettings
from attune.common.models.feature_mean import KNOWN, MEAN
from attune.fedclient.work.executor import Cancelled, Jobs
from attune.fedclient.work.measures import mean_cross_entropy
from attune.fedclient.work.objectives.base import PERSONAL, Batch, LocalTask, Network, Objective, Tensors, Trained, personal
from attune.fedclient.work.objectives.descent import Descent


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


SHIFT = f"{PERSONAL}shift"  # b of the paper, (D,)
SAMPLES = 512  # of one forward pass that measures


class DomainBias(Objective[DomainBiasSettings]):
    """SGD on the loss of head(f(x) + b) and a pull of the device's mean features to those of all devices (eq. 6 and 7).

    The first order measures: the device trains without b and pull, and hands in the mean of its features by the trained model,
    beside the model as it was served. The aggregator's mean of these is the M of the paper.
    """

    by_itself = "the running mean of a device's features goes on from batch to batch"

    def extras(self, tensors: Mapping[str, Tensor], network: Network) -> Tensors:
        """Return b, with zeros."""
        return {SHIFT: torch.zeros_like(tensors[MEAN])}

    def work(self, task: LocalTask) -> Jobs[Trained]:
        """Train the model and b, or measure if M is not known."""
        # A mean over devices of ones, which rounding can make a little less than 1.
        if float(task.start[KNOWN]) < 0.5:
            return (yield from self._measured(task))
        mean_D, weight = task.start[MEAN], f"{task.network.head}.weight"
        kappa, momentum = self._settings.kappa, self._settings.feature_momentum
        running_D = torch.zeros_like(mean_D)  # m of the paper: begins anew in each order

        def loss(tensors: Mapping[str, Tensor], beside: Mapping[str, Tensor], batch: Batch) -> Tensor:
            nonlocal running_D
            logits_BC, features_BD = task.network.with_features(tensors, batch.x)
            shifted_BC = logits_BC + linear(tensors[SHIFT], tensors[weight])  # the head is linear
            running_D = (1 - momentum) * running_D.detach() + momentum * features_BD.flatten(end_dim=-2).mean(dim=0)
            pull = (running_D - mean_D).square().mean() / 2
            return task.measure.loss(shifted_BC, batch.y, batch.weight) + kappa * pull

        trained: Trained = yield Descent(task, task.settings, task.start, loss, by_itself=self.by_itself)
        return trained

    def _measured(self, task: LocalTask) -> Jobs[Trained]:
        """Train a copy of the model, and return the start with the mean of the copy's features."""
        model = {name: tensor for name, tensor in task.start.items() if name != SHIFT}
        trained: Trained = yield Descent(task, task.settings, model, task.plain)
        known = {MEAN: _mean_features(task, trained.tensors), KNOWN: torch.ones_like(task.start[KNOWN])}
        return Trained(task.start | {name: tensor for name, tensor in known.items() if task.takes(name)}, trained.loss)


def _mean_features(task: LocalTask, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the mean over all training samples of what enters the head, (D,), in evaluation mode.

    Raises:
        Cancelled: The work was replaced.
    """
    total_D, count = torch.zeros_like(tensors[MEAN]), 0
    task.network.model.eval()
    for x in torch.split(task.x, SAMPLES):
        if task.cancelled():
            raise Cancelled("this work was replaced")
        with torch.no_grad():
            _, features = task.network.with_features(tensors, x.to(task.device))
        rows = features.flatten(end_dim=-2)
        total_D, count = total_D + rows.sum(dim=0), count + len(rows)
    return total_D / max(1, count)
