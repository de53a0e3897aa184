"""pFedGP: Gaussian processes on the features of a network, trained by marginal likelihood, whose posterior predicts.

Achituve, Shamsian, Navon, Chechik, Fetaya, "Personalized Federated Learning with Gaussian Processes", NeurIPS 2021. The
gradient is that of Snell, Zemel, "Bayesian Few-Shot Classification with One-vs-Each Polya-Gamma Augmented Gaussian
Processes", ICLR 2021. The classes that a device has are the leaves of a binary tree, with a two-class problem at each node.

B samples of a batch, P points of the training samples, Q queries, D features, K classes that occur, C classes of the model,
J = K - 1 inner nodes, S chains, T labels of a sample. A tree is a tensor sides_JC, root first: 1 for a class that goes left
at a node, -1 for one that goes right, 0 for one that never comes there.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from attune.common.errors import SettingError
from attune.contrib.gp.method import GpObjectiveSettings, GpPredictorSettings
from attune.contrib.gp.process import (
    LinAlgError,
    covariance,
    exact,
    gibbs,
    log_evidence,
    log_probabilities,
    own_covariance,
    posterior,
)
from attune.fedclient.work.executor import Jobs
from attune.fedclient.work.objectives.base import Batch, LocalTask, Network, Objective, Tensors, Trained, split
from attune.fedclient.work.objectives.descent import Descent, TrainingDiverged
from attune.fedclient.work.orders import FEATURES
from attune.fedclient.work.predictors.base import LABELS, Predictor, remember

SWEEPS = 20  # of the clustering, at most: few class means settle in two or three


def class_tree(features_PD: Tensor, labels_P: Tensor, classes: int) -> Tensor:
    """Return the tree (J, C), int64: classes are divided by the likeness of their mean features, again and again.

    GP-Tree: Achituve, Navon, Yemini, Chechik, Fetaya, ICML 2021.
    """
    present_K = torch.unique(labels_P)
    means_KD = torch.stack([features_PD[labels_P == label].mean(dim=0) for label in present_K])
    rows: list[Tensor] = []
    _divide(present_K, means_KD, classes, rows)
    return torch.stack(rows) if rows else labels_P.new_zeros(0, classes)


def members(labels_P: Tensor, side_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return which points come to this node (p,), and where each goes (p,): 1.0 left, -1.0 right, float64."""
    side_P = side_C[labels_P]
    index_p = side_P.nonzero().flatten()
    return index_p, side_P[index_p].double()


def _divide(classes_K: Tensor, means_KD: Tensor, classes: int, rows: list[Tensor]) -> None:
    if len(classes_K) < 2:
        return
    left_K = _two_means(means_KD)
    if left_K.all():  # means that coincide, or are not numbers
        left_K = torch.arange(len(left_K), device=left_K.device) < len(left_K) // 2
    row_C = classes_K.new_zeros(classes)
    row_C[classes_K] = torch.where(left_K, 1, -1)
    rows.append(row_C)
    for side_K in (left_K, ~left_K):
        _divide(classes_K[side_K], means_KD[side_K], classes, rows)


def _two_means(means_KD: Tensor) -> Tensor:
    """Return (K,) bool: the cluster that the first is in, of two that start as the two means furthest apart."""
    square_KK = (means_KD.unsqueeze(1) - means_KD).square().sum(dim=-1)
    one, two = divmod(int(square_KK.argmax()), len(means_KD))
    left_K = square_KK[one] < square_KK[two]
    for _ in range(SWEEPS):
        to_left_K, to_right_K = ((means_KD - means_KD[side].mean(dim=0)).square().sum(dim=-1) for side in (left_K, ~left_K))
        before_K, left_K = left_K, to_left_K < to_right_K
        if left_K.equal(before_K):
            break
    return left_K if left_K[0] else ~left_K


class GpObjective(Objective[GpObjectiveSettings]):
    """-log p(y of the batch) per point, over all inner nodes of the device's class tree, minimised in what makes the features.

    The classifier head takes no part. The loss reported is the augmented one: comparable over rounds, not with other methods.
    """

    by_itself = "the Gaussian processes have a class tree and Gibbs draws of each device's own"

    def extras(self, tensors: Mapping[str, Tensor], network: Network) -> Tensors:
        """Return no extras.

        Raises:
            SettingError: The model is a head alone, which leaves nothing to train.
        """
        if not any("head" not in network.roles[name] for name in network.trainable):
            raise SettingError(f"the model {type(network.model).__name__} has no layer before its head: choose another model")
        return {}

    def work(self, task: LocalTask) -> Jobs[Trained]:
        tree_JC = self._tree(task)
        generator = torch.Generator().manual_seed(task.seeds("gibbs"))

        def loss(tensors: Mapping[str, Tensor], beside: Mapping[str, Tensor], batch: Batch) -> Tensor:
            _, features = task.network.with_features(tensors, batch.x)
            features_PD, labels_P = exact(features.flatten(end_dim=-2)), batch.y.flatten()
            if len(labels_P) > self._settings.batch_points:
                kept = torch.randperm(len(labels_P), generator=generator)[: self._settings.batch_points].to(labels_P.device)
                features_PD, labels_P = features_PD[kept.to(features_PD.device)], labels_P[kept]
            return self._loss(tree_JC, features_PD, labels_P.to(features_PD.device), generator)

        try:
            trained: Trained = yield Descent(task, task.settings, task.start, loss, by_itself=self.by_itself)
        except LinAlgError as error:
            raise TrainingDiverged(
                f"the kernel matrix of the features is not finite any more (lr {task.settings.lr:g}): "
                "lower train.lr or set train.clip_norm on the server"
            ) from error
        return trained

    def _tree(self, task: LocalTask) -> Tensor:
        classes = len(task.start[f"{task.network.head}.weight"])
        memory = remember(task, task.start, torch.arange(len(task.x)))
        if memory is None:
            return task.y.new_zeros(0, classes)
        features_PD = exact(memory[0])
        return class_tree(features_PD, memory[1].to(features_PD.device), classes)

    def _loss(self, tree_JC: Tensor, features_PD: Tensor, labels_P: Tensor, generator: torch.Generator) -> Tensor:
        total = features_PD.sum() * 0.0  # a device of one class has no node, and a gradient of zero
        for side_C in tree_JC:
            index_p, sign_p = members(labels_P, side_C)
            if len(index_p):
                K_pp = own_covariance(self._settings, features_PD[index_p])
                omega_Sp = gibbs(self._settings, K_pp.detach(), sign_p, generator)
                total = total - log_evidence(K_pp, omega_Sp, sign_p).mean()
        return total / len(labels_P)


TREE, OMEGA = "memory.tree", "memory.omega"
ABSENT = -1e4  # log probability of a class that the device has no sample of: below that of any other


class GpPredictor(Predictor[GpPredictorSettings]):
    """log p(c | x): at each inner node on the way to c, the chance of its side, averaged over Gibbs chains; added up.

    Features, labels and the chains' last omega are made anew for every model, on the device alone. A device of one class says
    that class whatever it sees; one without samples has the model's own logits.
    """

    by_itself = "the Gaussian processes are of each device's own training samples"

    @torch.no_grad()
    def prepare(self, task: LocalTask) -> Tensors:
        """Return the model's tensors, features (P, D), labels (P,), tree (J, C) and omega (J, S, P), 0 where not of a node.

        Raises:
            TrainingDiverged: The features are not finite.
            Cancelled: Another order, or the end, has replaced this work.
        """
        model, _ = split(task.start)
        generator = torch.Generator().manual_seed(task.seeds("gibbs memory"))
        points_P = chosen(task.y.flatten().cpu(), self._settings.memory_points, generator)
        per_sample = max(1, task.y[:1].numel())
        samples_N, row_P = torch.unique(points_P // per_sample, return_inverse=True)
        memory = remember(task, model, samples_N)
        if memory is None:
            return model
        at_P = (row_P * per_sample + points_P % per_sample).to(task.device)
        features_PD, labels_P = memory[0][at_P], memory[1][at_P]
        tree_JC, omega_JSP = self._chains(exact(features_PD), labels_P, len(model[f"{task.network.head}.weight"]), generator)
        return model | {FEATURES: features_PD, LABELS: labels_P, TREE: tree_JC, OMEGA: omega_JSP.to(features_PD)}

    def logits(self, network: Network, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return log probabilities, float32."""
        logits, features = network.with_features(tensors, x)
        if FEATURES not in tensors:
            return logits
        memory_PD, queries_QD = exact(tensors[FEATURES]), exact(features.flatten(end_dim=-2))
        labels_P = tensors[LABELS].to(memory_PD.device)
        scores_QC = torch.full((len(queries_QD), logits.shape[-1]), ABSENT, dtype=torch.float64, device=memory_PD.device)
        scores_QC[:, torch.unique(labels_P)] = 0.0
        for side_C, omega_SP in zip(tensors[TREE].to(memory_PD.device), exact(tensors[OMEGA]), strict=True):
            index_p, sign_p = members(labels_P, side_C)
            node_pD = memory_PD[index_p]
            K_pp, cross_pQ = own_covariance(self._settings, node_pD), covariance(self._settings, node_pD, queries_QD)
            mean_SQ, variance_SQ = posterior(K_pp, cross_pQ, self._settings.output_scale, omega_SP[:, index_p], sign_p)
            for sign, log_Q in zip((1, -1), log_probabilities(mean_SQ, variance_SQ), strict=True):
                scores_QC[:, side_C == sign] += log_Q.unsqueeze(1)
        return scores_QC.float().to(logits.device).view(logits.shape)

    def _chains(self, features_PD: Tensor, labels_P: Tensor, classes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        labels_P = labels_P.to(features_PD.device)
        tree_JC = class_tree(features_PD, labels_P, classes)
        omega_JSP = features_PD.new_zeros(len(tree_JC), self._settings.gibbs_draws, len(labels_P))
        for omega_SP, side_C in zip(omega_JSP, tree_JC, strict=True):
            index_p, sign_p = members(labels_P, side_C)
            try:
                K_pp = own_covariance(self._settings, features_PD[index_p])
                omega_SP[:, index_p] = gibbs(self._settings, K_pp, sign_p, generator)
            except LinAlgError as error:
                raise TrainingDiverged("the features are not finite any more: lower train.lr on the server") from error
        return tree_JC, omega_JSP


def chosen(labels_P: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Return (size,) or fewer positions, in order: drawn at random, but one of every class before a second of any."""
    order_P = torch.randperm(len(labels_P), generator=generator)
    _, first = np.unique(labels_P[order_P].numpy(), return_index=True)
    one_of_each = torch.zeros(len(order_P), dtype=torch.bool)
    one_of_each[first] = True
    return torch.cat([order_P[one_of_each], order_P[~one_of_each]])[:size].sort().values
