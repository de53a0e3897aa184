"""The weights of a blend where a device holds nothing out to weigh models by: from what its training samples still tell.

Every model has seen them, so they do not say which is better. Two things they do say. A model that explains them no better than
a constant answer does no better elsewhere: as the common model, where the tasks of devices contradict each other. And a model
that was trained alone on a few samples is far surer of itself than those that were made of many devices' samples: its scores
are multiplied by the sharpness with which it explains the training samples as well as they do. Then it counts a third, for it
is the worst of them more often than not (docs/does-it-help.md). V training samples, T labels of a sample, G sharpnesses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from attune.common.metrics import Choice
from attune.fedclient.work.blend import Member, pseudo_counts
from attune.fedclient.work.calibration import log_likelihoods
from attune.fedclient.work.job import Jobs
from attune.fedclient.work.trainer import Tensors, Trainer

ALONE = 1 / 3  # what the model counts that was trained alone, beside those of the federation


def unweighed(
    candidates: Mapping[Choice, tuple[Trainer, Tensors]], own: Choice, x: Tensor, y: Tensor, prior: Mapping[Choice, float]
) -> Jobs[dict[Choice, Member]]:
    """The models that count, with their weights; empty where that is the own one alone.

    x (V, ...), y (V,) or (V, T): the training samples. prior: as blend.pseudo_counts, of the federation's models.
    """
    found: dict[Choice, Tensor] = {}
    for name, (trainer, tensors) in candidates.items():
        found[name] = yield from trainer.likelihoods(tensors, x, y)
    measure = candidates[own][0].measure
    plain, least = list(measure.sharpnesses).index(1.0), _fit(measure.constant_likelihood(y.cpu()))
    useful = [name for name, each in found.items() if _fit(each[plain]) > least] or [own]
    federated: list[Choice] = [name for name in useful if name != "local"]
    counts = pseudo_counts(federated, prior) if federated else []
    weights: dict[Choice, float] = {name: count / sum(counts) for name, count in zip(federated, counts, strict=True)}
    sharpness = dict.fromkeys(useful, 1.0)
    if federated and "local" in useful:
        together = torch.stack([weight * found[name][plain] for name, weight in weights.items()]).sum(dim=0)
        sharpness["local"] = _as_sure(measure.sharpnesses, found["local"], _fit(together))
        weights = {name: (1 - ALONE) * weight for name, weight in weights.items()}
    if "local" in useful:
        weights["local"] = ALONE if federated else 1.0
    return {} if useful == [own] else {name: Member(weights[name], *candidates[name], sharpness[name]) for name in useful}


def _fit(probability: Tensor) -> float:
    """Of what the right labels are given, (V,) or (V, T): the log-likelihood of V samples."""
    return float(log_likelihoods(probability.unsqueeze(0)))


def _as_sure(sharpnesses: Sequence[float], probability_GV: Tensor, fit: float) -> float:
    """The least of ascending sharpnesses with which samples are explained as well as that; else the one that does best."""
    fit_G = log_likelihoods(probability_GV)
    reached = torch.nonzero(fit_G >= fit)
    return sharpnesses[int(reached[0]) if len(reached) else int(fit_G.argmax())]
