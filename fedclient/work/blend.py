"""Several models that predict together: a weighted mean of their probabilities or numbers, with weights by held-out likelihood.

K models, V validation samples (or training samples), T labels of a sample, N = V T of all, C classes, G sharpnesses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attune.common.metrics import prior_shares
from attune.fedclient.work.calibration import FLOOR, log_likelihoods
from attune.fedclient.work.executor import Jobs, alone
from attune.fedclient.work.objectives.base import Tensors
from attune.fedclient.work.trainer import EVALUATION_BATCH, Scores, Trainer

# Pseudo-count of the prior for each model. It draws weights from few samples towards those that other devices found, or
# towards equal weights.
PSEUDO_COUNT = 1.0
NOTHING: Mapping[str, float] = MappingProxyType({})  # no device has found anything yet
LOCAL_SHARE = 1 / 3  # weight of the model that was trained alone, where no sample was held out
MOST_TURNS = 500  # of leaving samples out; of more samples several are left out together, which hardly changes the weights
LEFT_OUT_AT_ONCE = 256  # samples that are left out in turn, whose weights are found together; bounds the memory
ITERATIONS = 200  # converged to about 1e-6 for tens of samples; each iteration is K * V numbers


@dataclass(frozen=True)
class Member:
    """A model of the blend, what computes it, and the factor of its scores before they become probabilities (sharpness)."""

    weight: float
    trainer: Trainer
    tensors: Tensors
    sharpness: float = 1.0

    def shares_of(self, scores: Tensor) -> Tensor:
        """Return its part of the blend's probabilities, or numbers, from its scores of a batch (B, ..., C)."""
        return self.weight * self.trainer.measure.shares(self.sharpness * scores)


def pseudo_counts(models: Collection[str], prior: Mapping[str, float]) -> list[float]:
    """Return the pseudo-count of each model in the prior, (K,). Their sum is K * PSEUDO_COUNT.

    Args:
        models: The K models.
        prior: Shares of models, as other devices found them. Other models in it are ignored; if one of `models` is missing, the
            counts are those of metrics.prior_shares.
    """
    known = {model: prior.get(model, 0.0) for model in models}
    shares = known if all(known.values()) else prior_shares(known)
    total = sum(shares.values())
    return [PSEUDO_COUNT * (len(known) * shares[model] / total) for model in models]


def weights_of(
    probability: Mapping[str, Tensor], prior: Mapping[str, float] = NOTHING, weight: Tensor | None = None
) -> dict[str, float]:
    """Return the most probable weights of a mixture of these models; they are >= 0 and sum to 1.

    The prior is Dirichlet(1 + the pseudo counts). The method is expectation maximisation for mixing proportions (Dempster,
    Laird, Rubin, J. of the Royal Statistical Society B 1977).

    Args:
        probability: What each model gives to the right labels of the same V samples, (V,) or (V, T); a sequence counts as one
            sample. For numbers it is a density: weights depend on ratios alone.
        prior: Same as in `pseudo_counts`.
        weight: Weight of each sample, (V,) float64.
    """
    p_KVT = torch.stack([p.double().reshape(len(p), -1).clamp_min(FLOOR) for p in probability.values()])
    p_KN, labels = p_KVT.flatten(1).numpy(), p_KVT.shape[2]  # of arrays this small, numpy's operations take half as long
    v_N = np.ones(p_KN.shape[1]) if weight is None else np.repeat(weight.numpy(), labels)
    before_K = np.array(pseudo_counts(probability, prior))
    w_K = np.full(len(p_KN), 1.0 / len(p_KN))
    for _ in range(ITERATIONS):
        count_K = w_K * (p_KN @ (v_N / (w_K @ p_KN))) / labels + before_K
        w_K = count_K / count_K.sum()
    return dict(zip(probability, w_K.tolist(), strict=True))


def leave_one_out(
    probability: Mapping[str, Tensor],
    prior: Mapping[str, float] = NOTHING,
    weight: Tensor | None = None,
    groups: npt.NDArray[np.intp] | None = None,
) -> npt.NDArray[np.float64]:
    """Return the log-likelihood (nats) of each sample under the mixture with the weights that are found without it, (V,).

    The weights of `weights_of` suit the samples by which they were found, so they say too much about them.

    Args:
        probability: Same as in `weights_of`.
        prior: Same as in `pseudo_counts`.
        weight: Same as in `weights_of`.
        groups: Group of each sample, (V,), numbered from 0: a sample is left out with its whole group. None: with no other, up
            to MOST_TURNS samples.
    """
    p_KVT = torch.stack([p.double().reshape(len(p), -1).clamp_min(FLOOR) for p in probability.values()]).numpy()
    models, samples, labels = p_KVT.shape
    p_KN, before_K = p_KVT.reshape(models, -1), np.array(pseudo_counts(probability, prior))
    value_V = np.ones(samples) if weight is None else weight.numpy()
    group_V = (np.arange(samples) if groups is None else groups) % MOST_TURNS
    each_V = np.empty(samples)
    for first in range(0, group_V.max() + 1, LEFT_OUT_AT_ONCE):
        left_G = np.arange(first, min(first + LEFT_OUT_AT_ONCE, group_V.max() + 1))
        value_GN = np.repeat(value_V * (group_V != left_G[:, None]), labels, axis=1)
        w_GK = np.full((len(left_G), models), 1.0 / models)
        for _ in range(ITERATIONS):
            count_GK = w_GK * ((value_GN / (w_GK @ p_KN)) @ p_KN.T) / labels + before_K
            w_GK = count_GK / count_GK.sum(axis=1, keepdims=True)
        for left, w_K in zip(left_G, w_GK, strict=True):
            scored = group_V == left
            each_V[scored] = np.log(np.tensordot(w_K, p_KVT[:, scored], axes=1)).mean(axis=1)
    return each_V


@dataclass(frozen=True)
class Weighing:
    """`weights_of` as a job."""

    probability: Mapping[str, Tensor]
    prior: Mapping[str, float] = field(default_factory=dict)
    weight: Tensor | None = None  # (V,)

    def alone(self) -> dict[str, float]:
        return weights_of(self.probability, self.prior, self.weight)


def unweighed(
    candidates: Mapping[str, tuple[Trainer, Tensors]], own_choice: str, x: Tensor, y: Tensor, prior: Mapping[str, float]
) -> Jobs[dict[str, Member]]:
    """Return the blend of a device that holds no samples out to weigh the models by.

    Every model has trained on x (V, ...), y (V,) or (V, T), so these samples do not say which model is better. They say two
    things. A model that explains them no better than a constant answer does no better elsewhere, such as the common model
    where the tasks of devices contradict each other. And a model that was trained alone on a few samples is far surer of
    itself than those that were made of many devices' samples: its scores are multiplied by the sharpness with which it
    explains the training samples as well as they do. Then it counts a third, because it is the worst of them more often than
    not (docs/does-it-help.md).

    Args:
        candidates: The models, each with what computes it.
        own_choice: The model that the method leads to.
        x: Training samples.
        y: Their labels.
        prior: Same as for `pseudo_counts`, for the federation's models.

    Returns:
        The models with weights; empty if only the device's own model counts.
    """
    likelihoods: dict[str, Tensor] = {}
    for name, (trainer, tensors) in candidates.items():
        likelihoods[name] = yield from trainer.likelihoods(tensors, x, y)
    measure = candidates[own_choice][0].measure
    plain, least = list(measure.sharpnesses).index(1.0), _fit(measure.constant_likelihood(y.cpu()))
    useful = [name for name, likelihood in likelihoods.items() if _fit(likelihood[plain]) > least] or [own_choice]
    federated: list[str] = [name for name in useful if name != "local"]
    counts = pseudo_counts(federated, prior) if federated else []
    weights: dict[str, float] = {name: count / sum(counts) for name, count in zip(federated, counts, strict=True)}
    sharpness = dict.fromkeys(useful, 1.0)
    if federated and "local" in useful:
        together = torch.stack([weight * likelihoods[name][plain] for name, weight in weights.items()]).sum(dim=0)
        sharpness["local"] = _as_sure(measure.sharpnesses, likelihoods["local"], _fit(together))
        weights = {name: (1 - LOCAL_SHARE) * weight for name, weight in weights.items()}
    if "local" in useful:
        weights["local"] = LOCAL_SHARE if federated else 1.0
    if useful == [own_choice]:
        return {}
    return {name: Member(weights[name], *candidates[name], sharpness[name]) for name in useful}


def _fit(probability: Tensor) -> float:
    """Return the log-likelihood of V samples from the probabilities of their right labels, (V,) or (V, T)."""
    return float(log_likelihoods(probability.unsqueeze(0)))


def _as_sure(sharpnesses: Sequence[float], probability_GV: Tensor, fit: float) -> float:
    """Return the least of ascending sharpnesses that explains samples as well as `fit`; else the best one."""
    fit_G = log_likelihoods(probability_GV)
    reached = torch.nonzero(fit_G >= fit)
    return sharpnesses[int(reached[0]) if len(reached) else int(fit_G.argmax())]


def answers_of(members: Sequence[Member], x: Tensor) -> Tensor:
    """Return the blend's answers for x (N, ...), as Measure.of_scores, on the CPU. There is at least one member."""
    return alone(answering(members, x))


def answering(members: Sequence[Member], x: Tensor) -> Jobs[Tensor]:
    """Compute `answers_of` with jobs that many devices can compute together."""
    pieces, measure = [], members[0].trainer.measure
    answers = measure.of_shares if len(members) > 1 else measure.of_scores
    for at in range(0, len(x), EVALUATION_BATCH):
        scores = []
        for member in members:
            [(_, logits)] = yield Scores(member.trainer, member.tensors, x[at : at + EVALUATION_BATCH])
            # A model alone needs no probabilities: its logits have the same order.
            scores.append(member.shares_of(logits) if len(members) > 1 else logits)
        pieces.append(answers(torch.stack(scores).sum(dim=0)).cpu())
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)


def sharing(members: Sequence[Member], x: Tensor) -> Jobs[Tensor]:
    """Compute the blend's probabilities of x (N, ...), or its numbers, (N, C), on the CPU, with jobs like `answering`."""
    total = torch.zeros(())
    for member in members:
        scores: Iterable[tuple[int, Tensor]] = yield Scores(member.trainer, member.tensors, x)
        total = total + torch.cat([member.shares_of(logits).cpu() for _, logits in scores])
    return total


def blended_logits(members: Sequence[Member], x: Tensor) -> Tensor:
    """Return scores with the blend's probabilities (or its numbers), (B, ..., C), for one batch x (B, ...)."""
    return members[0].trainer.measure.scores_of(blended_shares(members, x))


def blended_shares(members: Sequence[Member], x: Tensor) -> Tensor:
    """Return the blend's probabilities, or its numbers, (B, ..., C), for one batch x (B, ...)."""
    return torch.stack([member.shares_of(member.trainer.scores(member.tensors, x)) for member in members]).sum(dim=0)
