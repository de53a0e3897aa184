"""Sums over a device's samples, from which the server solves for weights (closed form)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, cast

import torch
from torch import Tensor

from attune.common.methods.ridge import (
    COUNTED,
    CROSS,
    ERRORS,
    FEWEST,
    GAMMA,
    GAMMAS,
    GRAM,
    STRENGTH,
    STRENGTHS,
    WEIGHT,
    out_of_fold,
    solved,
    sums_manifest,
    sums_of,
    targets_of,
    whole,
)
from attune.common.methods.settings.objectives import SumsSettings
from attune.common.models.closed_form import ClosedForm
from attune.fedclient.work.job import Jobs
from attune.fedclient.work.measures import Labels
from attune.fedclient.work.objectives.base import PERSONAL, LocalTask, Network, Objective, Tensors, Trained
from attune.fedclient.work.objectives.descent import TrainingDiverged

BATCH = 256  # samples that pass a frozen body together


class SampleSums(Objective[SumsSettings]):
    """G, B and s over all training samples, and the errors of models that are drawn from the served weights.

    He et al., AFL, CVPR 2025; the letters are those of common.methods.ridge. Where one sum of all devices is served, the device
    keeps what it gave to it, and from then on hands in errors alone.
    """

    by_itself = "it takes no steps"
    hands_in: ClassVar[Mapping[str, str]] = {name: PERSONAL + name for name in sums_manifest(1, 1)}

    def extras(self, tensors: Mapping[str, Tensor], network: Network) -> Tensors:
        manifest = sums_manifest(*tensors[WEIGHT].shape, one_sum=GAMMA in tensors)
        return {PERSONAL + name: torch.zeros(spec.shape, dtype=torch.float64) for name, spec in manifest.items()}

    def handed_in(self, tensors: Mapping[str, Tensor]) -> tuple[Tensors, bool]:
        values, _ = super().handed_in(tensors)
        if not knows_sum(tensors):
            return values, True
        return {name: tensor if name == ERRORS else torch.zeros_like(tensor) for name, tensor in values.items()}, False

    def work(self, task: LocalTask) -> Jobs[Trained]:
        """Return the sums beside the tensors as they are. The loss is the mean squared error of the served weights."""
        yield from ()
        Z_ND, T_NC = features_and_targets(task)
        sums, error_L = sums_of(Z_ND, T_NC), torch.zeros(len(STRENGTHS), dtype=torch.float64)
        served_CD = others(task).to(Z_ND)
        if knows_sum(task.start):
            sums = {name: task.start[PERSONAL + name] for name in sums}
            error_L = torch.stack([errors_of(task, Z_ND, T_NC, others(task, gamma).to(Z_ND), True) for gamma in GAMMAS])
        elif GAMMA in task.start:
            error_L = error_L.new_zeros(len(GAMMAS), 1 + len(STRENGTHS))
        elif bool(served_CD.any()):
            error_L = errors_of(task, Z_ND, T_NC, served_CD)
        kept = {PERSONAL + name: tensor.cpu() for name, tensor in {**sums, ERRORS: error_L}.items()}
        return Trained(task.start | kept, float((T_NC - Z_ND @ served_CD.T).square().mean()))


def knows_sum(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a sum of all devices was served."""
    return GAMMA in tensors and float(tensors[GRAM][-1]) > 0


def others(task: LocalTask, gamma: float | None = None) -> Tensor:
    """Return W' (C, D), the weights of all other devices: as served, or by the served sum without what this device gave to it.

    Args:
        task: The task.
        gamma: Strength of the ridge; None: the served one.

    Raises:
        TrainingDiverged: The served sum is none.
    """
    start = task.start
    if not knows_sum(start):
        return start[WEIGHT]
    G, B_DC = (start[name] - start[COUNTED] * start[PERSONAL + name].to(start[name]) for name in (GRAM, CROSS))
    try:
        return solved(whole(G, len(B_DC)), B_DC, gamma or float(start[GAMMA]))
    except RuntimeError:  # torch.linalg.LinAlgError, which mypy does not know
        raise TrainingDiverged("the sum that the server serves, without this device, is that of no samples") from None


def centre_of(task: LocalTask) -> tuple[Tensor, float]:
    """Return the weights around which the device draws its own, and by which strength; 0: it keeps them. Errors as `others`."""
    if knows_sum(task.start) and len(task.y) < FEWEST:
        return task.start[WEIGHT], 0.0
    return others(task), float(task.start[STRENGTH])


def errors_of(task: LocalTask, Z_ND: Tensor, T_NC: Tensor, centre_CD: Tensor, common: bool = False) -> Tensor:
    """Return the squared error out of fold with each of STRENGTHS, (L,); with `common` that of the centre before, (1 + L,)."""
    error_L = torch.zeros(len(STRENGTHS), dtype=torch.float64)
    if task.fold is not None:
        left_LNC = T_NC - out_of_fold(Z_ND, T_NC, task.fold, centre_CD, STRENGTHS)
        error_L = left_LNC[:, task.fold >= 0].square().sum(dim=(1, 2))
    first = [(T_NC - Z_ND @ centre_CD.T).square().sum().view(1).to(error_L)] if common else []
    return torch.cat([*first, error_L])


def features_and_targets(task: LocalTask) -> tuple[Tensor, Tensor]:
    """Return Z (N, D) and T (N, C) of the training samples, float64."""
    model, batches = closed_form_of(task.network), task.x.split(BATCH)
    Z_ND = torch.cat([model.features(some_x.to(task.device), torch.float64) for some_x in batches])
    return Z_ND, targets_of(task.y.to(task.device), len(task.start[WEIGHT]), isinstance(task.measure, Labels))


def closed_form_of(network: Network) -> ClosedForm:
    """Return the module of a network, which `--method analytic` has fixed."""
    return cast(ClosedForm, network.model)
