"""Sums over a device's samples, from which the server solves for weights (closed form)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, cast

import torch
from torch import Tensor

from attune.common.methods.ridge import (
    BLOCK,
    COUNTED,
    CROSS,
    ERRORS,
    FEWEST,
    GAMMA,
    GAMMAS,
    GRAM,
    SQUARES,
    STRENGTH,
    STRENGTHS,
    WEIGHT,
    error_of,
    fold_errors,
    is_alone_in_a_class,
    places_of,
    sizes_of,
    sums_manifest,
    sums_of,
    targets_of,
    without_own,
)
from attune.common.methods.settings.objectives import SumsSettings
from attune.common.models.closed_form import ClosedForm
from attune.fedclient.work.executor import Jobs
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
    hands_in: ClassVar[Mapping[str, str]] = {name: PERSONAL + name for name in sums_manifest(1, [1])}

    def extras(self, tensors: Mapping[str, Tensor], network: Network) -> Tensors:
        manifest = sums_manifest(len(tensors[WEIGHT]), sizes_of(tensors), one_sum=GAMMA in tensors)
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
        sizes = sizes_of(task.start)
        sums, served_CD = sums_of(Z_ND, T_NC, sizes), others(task).to(Z_ND)
        error = Z_ND.new_zeros(sums_manifest(1, sizes, one_sum=GAMMA in task.start)[ERRORS].shape)
        if knows_sum(task.start):
            sums = {name: task.start[PERSONAL + name] for name in sums}
            by_gamma = [errors_of(task, Z_ND, T_NC, others(task, gamma).to(Z_ND), True) for gamma in GAMMAS]
            error = torch.stack(by_gamma, dim=1)
        elif GAMMA not in task.start and bool(served_CD.any()):
            error = errors_of(task, Z_ND, T_NC, served_CD)
        kept = {PERSONAL + name: tensor.cpu() for name, tensor in {**sums, ERRORS: error}.items()}
        used = block_of(task)
        return Trained(task.start | kept, float((T_NC - Z_ND[:, used] @ served_CD[:, used].T).square().mean()))


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
    try:
        return without_own(start, {name: start[PERSONAL + name] for name in (GRAM, CROSS)}, gamma)
    except RuntimeError:  # torch.linalg.LinAlgError, which mypy does not know
        raise TrainingDiverged("the sum that the server serves, without this device, is that of no samples") from None


def block_of(task: LocalTask) -> slice:
    """Return the place of the block of features that predicts."""
    return places_of(sizes_of(task.start))[int(task.start[BLOCK])]


def centre_of(task: LocalTask) -> tuple[Tensor, float]:
    """Return the weights around which the device draws its own, and by which strength; 0: it keeps them. Errors as `others`."""
    start, given = task.start, {name: task.start[PERSONAL + name] for name in (CROSS, SQUARES)}
    if knows_sum(start) and (len(task.y) < FEWEST or (start[COUNTED] and is_alone_in_a_class(start, given))):
        return start[WEIGHT], 0.0
    return others(task), float(start[STRENGTH])


def errors_of(task: LocalTask, Z_ND: Tensor, T_NC: Tensor, centre_CD: Tensor, common: bool = False) -> Tensor:
    """Return for each block the error out of fold with each of STRENGTHS, (n, L).

    Of classes it is minus the log-likelihood, by which models are blended, else the squared error. With `common` the error of
    the centre stands before them, (n, 1 + L).
    """
    places, sharpness = places_of(sizes_of(task.start)), closed_form_of(task.network).sharpness if task.y.dim() == 1 else None
    error_nL = torch.zeros(len(places), len(STRENGTHS), dtype=torch.float64)
    if task.fold is not None:
        for block, place in enumerate(places):
            error_nL[block] = fold_errors(Z_ND[:, place], T_NC, task.fold, centre_CD[:, place], STRENGTHS, sharpness)
    if not common:
        return error_nL
    first = [error_of((Z_ND[:, place] @ centre_CD[:, place].T)[None], T_NC, sharpness) for place in places]
    return torch.cat([torch.stack(first).to(error_nL), error_nL], dim=1)


def features_and_targets(task: LocalTask) -> tuple[Tensor, Tensor]:
    """Return Z (N, D) and T (N, C) of the training samples, float64."""
    model, batches = closed_form_of(task.network), task.x.split(BATCH)
    Z_ND = torch.cat([model.features(some_x.to(task.device), torch.float64) for some_x in batches])
    return Z_ND, targets_of(task.y.to(task.device), len(task.start[WEIGHT]), isinstance(task.measure, Labels))


def closed_form_of(network: Network) -> ClosedForm:
    """Return the module of a network, which `--method analytic` has fixed."""
    return cast(ClosedForm, network.model)
