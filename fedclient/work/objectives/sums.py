"""Sums over a device's samples, from which the server solves for weights (closed form)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, cast

import torch
from torch import Tensor

from attune.common.methods.ridge import (
    ERRORS,
    STRENGTHS,
    WEIGHT,
    out_of_fold,
    sums_manifest,
    sums_of,
    targets_of,
)
from attune.common.methods.settings.objectives import SumsSettings
from attune.common.models.closed_form import ClosedForm
from attune.fedclient.work.job import Jobs
from attune.fedclient.work.measures import Labels
from attune.fedclient.work.objectives.base import PERSONAL, LocalTask, Objective, Tensors, Trained
from attune.fedclient.work.objectives.network import Network

BATCH = 256  # samples that pass a frozen body together


class SampleSums(Objective[SumsSettings]):
    """G, B and s over all training samples, and the errors of models that are drawn from the served weights.

    He et al., AFL, CVPR 2025; the letters are those of common.methods.ridge.
    """

    by_itself = "it takes no steps"
    hands_in: ClassVar[Mapping[str, str]] = {name: PERSONAL + name for name in sums_manifest(1, 1)}

    def extras(self, tensors: Mapping[str, Tensor], network: Network) -> Tensors:
        manifest = sums_manifest(*tensors[WEIGHT].shape)
        return {PERSONAL + name: torch.zeros(spec.shape, dtype=torch.float64) for name, spec in manifest.items()}

    def work(self, task: LocalTask) -> Jobs[Trained]:
        """Return the sums beside the tensors as they are. The loss is the mean squared error of the served weights."""
        yield from ()
        Z_ND, T_NC = features_and_targets(task)
        sums, error_L = sums_of(Z_ND, T_NC), torch.zeros(len(STRENGTHS), dtype=torch.float64)
        served_CD = task.start[WEIGHT].to(Z_ND)
        if task.fold is not None and bool(served_CD.any()):
            left_LNC = T_NC - out_of_fold(Z_ND, T_NC, task.fold, served_CD, STRENGTHS)
            error_L = left_LNC[:, task.fold >= 0].square().sum(dim=(1, 2))
        kept = {PERSONAL + name: tensor.cpu() for name, tensor in {**sums, ERRORS: error_L}.items()}
        return Trained(task.start | kept, float((T_NC - Z_ND @ served_CD.T).square().mean()))


def features_and_targets(task: LocalTask) -> tuple[Tensor, Tensor]:
    """Return Z (N, D) and T (N, C) of the training samples, float64."""
    model, batches = closed_form_of(task.network), task.x.split(BATCH)
    Z_ND = torch.cat([model.features(some_x.to(task.device), torch.float64) for some_x in batches])
    return Z_ND, targets_of(task.y.to(task.device), len(task.start[WEIGHT]), isinstance(task.measure, Labels))


def closed_form_of(network: Network) -> ClosedForm:
    """Return the module of a network, which `--method analytic` has fixed."""
    return cast(ClosedForm, network.model)
