"""pFedGP's training: the marginal likelihood of Gaussian processes on the features of a network.

Achituve, Shamsian, Navon, Chechik, Fetaya, "Personalized Federated Learning with Gaussian Processes", NeurIPS 2021. The
gradient is that of Snell, Zemel, "Bayesian Few-Shot Classification with One-vs-Each Polya-Gamma Augmented Gaussian
Processes", ICLR 2021.

B samples of a batch, P points, D features, J inner nodes of the tree, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attune.common.errors import SettingError
from attune.contrib.gp.method import GpObjectiveSettings
from attune.contrib.gp.process import LinAlgError, exact, gibbs, log_evidence, own_covariance
from attune.contrib.gp.tree import class_tree, members
from attune.fedclient.work.job import Jobs
from attune.fedclient.work.objectives.base import Batch, LocalTask, Objective, Tensors, Trained
from attune.fedclient.work.objectives.descent import Descent, TrainingDiverged
from attune.fedclient.work.objectives.memory import remember
from attune.fedclient.work.objectives.network import Network


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
