"""The posterior of Gaussian processes on the features of the device's own training samples (pFedGP).

N samples of the memory, Q queries, D features, C classes, S chains, J inner nodes of the tree.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from common.gp.process import covariance, exact, gibbs, log_probabilities, own_covariance, posterior, variance
from common.gp.tree import members, splits
from common.objectives.base import LocalTask, Tensors, split
from common.objectives.descent import TrainingDiverged
from common.objectives.network import Network
from common.predictors.base import Predictor
from common.predictors.memory import FEATURES, LABELS, drawn, remember
from common.predictors.settings import GpSettings

OMEGA = "memory.omega"
ABSENT = -100.0  # log probability of a class that the device has no sample of


class Gp(Predictor):
    """log p(c | x): at each inner node on the way to c, the chance of its side, averaged over Gibbs chains; added up.

    Features, labels and the chains' last omega are made anew for every model, on the device alone. A device of one class says
    that class whatever it sees; one without samples has the model's own logits.
    """

    def __init__(self, settings: GpSettings) -> None:
        self._settings = settings

    def __repr__(self) -> str:
        return f"Gp(kernel={self._settings.kernel}, draws={self._settings.gibbs_draws}, points={self._settings.memory_points})"

    @torch.no_grad()
    def prepare(self, task: LocalTask) -> Tensors:
        """The model's tensors with features (N, D), labels (N,) and omega (J, S, N), 0 where a sample is not of a node."""
        model, _ = split(task.start)
        found = remember(task, model, drawn(task, self._settings.memory_points))
        if found is None:
            return model
        generator = torch.Generator().manual_seed(task.seeds("gibbs memory"))
        kept_N = torch.randperm(len(found[1]), generator=generator)[: self._settings.memory_points].to(task.device)
        features_ND, labels_N = found[0][kept_N].float(), found[1][kept_N]
        tree = splits(labels_N.unique().tolist())
        omega_JSN = torch.zeros(len(tree), self._settings.gibbs_draws, len(kept_N), device=task.device)
        try:
            for node, of in enumerate(tree):
                index_n, sign_n = members(labels_N, of)
                K_nn = own_covariance(self._settings, exact(features_ND[index_n]))
                omega_JSN[node, :, index_n] = gibbs(self._settings, K_nn, sign_n.to(K_nn.device), generator).to(omega_JSN)
        except torch.linalg.LinAlgError as error:
            raise TrainingDiverged("the kernel matrix of the features is not finite: lower train.lr on the server") from error
        return model | {FEATURES: features_ND, LABELS: labels_N, OMEGA: omega_JSN}

    def logits(self, network: Network, tensors: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Log probabilities, float32."""
        logits, features = network.with_features(tensors, x)
        if FEATURES not in tensors:
            return logits
        memory_ND, queries_QD = exact(tensors[FEATURES]), exact(features.flatten(end_dim=-2))
        labels_N = tensors[LABELS]
        present = labels_N.unique().tolist()
        scores_QC = torch.full((len(queries_QD), logits.shape[-1]), ABSENT, dtype=torch.float64, device=memory_ND.device)
        scores_QC[:, present] = 0.0
        variance_Q = variance(self._settings, queries_QD)
        for of, omega_SN in zip(splits(present), exact(tensors[OMEGA]), strict=True):
            index_n, sign_n = (part.to(memory_ND.device) for part in members(labels_N, of))
            node_nD = memory_ND[index_n]
            cross_nQ = covariance(self._settings, node_nD, queries_QD)
            K_nn = own_covariance(self._settings, node_nD)
            sides = log_probabilities(*posterior(K_nn, cross_nQ, variance_Q, omega_SN[:, index_n], sign_n))
            for classes, log_Q in zip(of, sides, strict=True):
                scores_QC[:, classes] += log_Q.unsqueeze(1)
        return scores_QC.float().to(logits.device).view(logits.shape)
