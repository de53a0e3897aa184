"""pFedGP's prediction: the posterior of Gaussian processes on the features of the device's own training samples.

P points of the memory, Q queries, D features, C classes, S chains, J inner nodes of the tree, T labels of a sample.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from attune.contrib.gp.method import GpPredictorSettings
from attune.contrib.gp.process import LinAlgError, covariance, exact, gibbs, log_probabilities, own_covariance, posterior
from attune.contrib.gp.tree import class_tree, members
from attune.fedclient.work.objectives.base import LocalTask, Tensors, split
from attune.fedclient.work.objectives.descent import TrainingDiverged
from attune.fedclient.work.objectives.memory import FEATURES, LABELS, remember
from attune.fedclient.work.objectives.network import Network
from attune.fedclient.work.predictors.base import Predictor

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
