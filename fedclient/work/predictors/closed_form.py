"""A device's own weights, drawn from those of all other devices by ridge regression."""

from __future__ import annotations

import torch

from attune.common.methods.ridge import CROSS, GRAM, STRENGTH, WEIGHT, drawn, out_of_fold
from attune.common.methods.settings.objectives import ClosedFormPredictorSettings
from attune.fedclient.work.objectives.base import LocalTask, Tensors, split
from attune.fedclient.work.objectives.sums import block_of, centre_of, closed_form_of, features_and_targets
from attune.fedclient.work.predictors.base import Predictor


class ClosedFormPredictor(Predictor[ClosedFormPredictorSettings]):
    """W_i with (G_i + lambda I) W_i' = B_i + lambda W', W the served weights; with lambda 0 it is W (arXiv 2508.10732)."""

    scores_out_of_fold = True

    def prepare(self, task: LocalTask) -> Tensors:
        model, _ = split(task.start)
        model |= {name: torch.zeros_like(model[name]) for name in (GRAM, CROSS) if name in model}  # of all devices
        centre_CD, strength = centre_of(task)
        if not strength:
            return model | {STRENGTH: torch.zeros_like(model[STRENGTH])}
        Z_ND, T_NC = features_and_targets(task)
        used, W_CD = block_of(task), centre_CD.clone()
        W_CD[:, used] = drawn(Z_ND[:, used], T_NC, strength, centre_CD[:, used].to(Z_ND)).to(W_CD)
        return model | {WEIGHT: W_CD}

    def out_of_fold(self, task: LocalTask) -> torch.Tensor:
        (Z_ND, T_NC), used = features_and_targets(task), block_of(task)
        sharpness = closed_form_of(task.network).sharpness
        served_CD, strength = centre_of(task)
        Z_ND, served_CD = Z_ND[:, used], served_CD[:, used].to(Z_ND)
        if not strength:  # the served weights, which know these samples
            return (sharpness * (Z_ND @ served_CD.T)).float()
        if task.fold is None:
            return torch.full_like(T_NC, torch.nan).float()
        return (sharpness * out_of_fold(Z_ND, T_NC, task.fold, served_CD, [strength])[0]).float()
