"""Sums over a device's samples, from which the server solves for weights (closed form)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, cast

import torch
from torch import Tensor

from attune.common.methods.ridge import (
    ERRORS,
    STRENGTHS,
    WEIGHT,
    solved,
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


def out_of_fold(Z_ND: Tensor, T_NC: Tensor, fold_N: Tensor, centre_CD: Tensor, strengths: Sequence[float]) -> Tensor:
    """Return what the device's own models predict of each sample when they are drawn without the sample's fold, (L, N, C).

    It is NaN for samples in no fold (-1). There is a model for each of the L strengths.
    """
    predicted_LNC = T_NC.new_full((len(strengths), *T_NC.shape), torch.nan)
    by_centre_NC = Z_ND @ centre_CD.T
    gap_NC, few = T_NC - by_centre_NC, len(Z_ND) < Z_ND.shape[1]  # few: X are the N samples, as in `drawn`, else D features
    G_XX, B_XC = (Z_ND @ Z_ND.T, gap_NC) if few else (Z_ND.T @ Z_ND, Z_ND.T @ gap_NC)
    for fold in fold_N[fold_N >= 0].unique():
        left_N, rest_N = fold_N == fold, fold_N != fold
        if few:
            left_MX, rest_XX, rest_XC = G_XX[left_N][:, rest_N], G_XX[rest_N][:, rest_N], B_XC[rest_N]
        else:
            left_MX = Z_ND[left_N]
            rest_XX, rest_XC = G_XX - left_MX.T @ left_MX, B_XC - left_MX.T @ gap_NC[left_N]
        for place, strength in enumerate(strengths):
            predicted_LNC[place, left_N] = by_centre_NC[left_N] + left_MX @ solved(rest_XX, rest_XC, strength).T
    return predicted_LNC
