"""How sure a model may be of itself: one temperature, by the samples held out of training.

A model that has trained on a few samples alone gives its answers probabilities near 1; a mean of many models, or one of a few
rounds, hardly any above the rest. Both may be right equally often. So before models are compared by likelihood, or their
probabilities are averaged, each one's scores are multiplied by its own sharpness, which changes no answer of a model alone:
temperature scaling (Guo, Pleiss, Sun, Weinberger: On Calibration of Modern Neural Networks, ICML 2017, section 4.2), with a
prior, because few samples are held out. V held-out samples, T labels of a sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

PRIOR_SAMPLES = 3  # held-out samples with which the prior of log sharpness is half as wide as with many
FLOOR = 1e-6  # of a probability: a model may be certain and wrong once without being ruled out
SHARPNESSES = tuple(math.exp(step / 4) for step in range(-12, 13))  # three deviations to both sides
SHARPENED_ELEMENTS = 1 << 22  # most sharpened scores in memory at a time: 16 MiB


class Calibrated(NamedTuple):
    """Calibration of a model.

    Attributes:
        sharpness: Factor of the scores, an inverse temperature.
        probability: Probability of the right labels with it, (V,) or (V, T).
    """

    sharpness: float
    probability: Tensor


def sharpened(scores: Tensor, sharpnesses: Sequence[float]) -> Iterator[Tensor]:
    """Yield scores (B, ...) times each of G sharpnesses, (some of G, B, ...) at a time, as memory allows."""
    some = max(1, SHARPENED_ELEMENTS // max(scores.numel(), 1))
    factors_G = torch.tensor(sharpnesses, dtype=scores.dtype, device=scores.device)
    for at in range(0, len(factors_G), some):
        yield factors_G[at : at + some].view(-1, *[1] * scores.dim()) * scores


def log_likelihood(probability: Tensor, weight: Tensor | None = None) -> float:
    """Return the log-likelihood of V samples from the probabilities of their right labels, (V,) or (V, T).

    A sequence counts as one sample.
    """
    return float(log_likelihoods(probability.unsqueeze(0), weight))


def log_likelihoods(probability: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return G log-likelihoods, (G,), from probabilities (G, V) or (G, V, T).

    Args:
        probability: The probabilities of the right labels.
        weight: Weight of each sample, (V,) float64; None: 1.
    """
    p_GVT = probability.double().reshape(*probability.shape[:2], -1).clamp_min(FLOOR)
    each_GV = p_GVT.log().mean(dim=2)
    return each_GV.sum(dim=1) if weight is None else each_GV @ weight


def spread(samples: float) -> float:
    """Return the prior's standard deviation of log sharpness: 1 with many samples (95 % between 1/7 and 7), 0 with none.

    Two samples are easily right or wrong by chance, so they say little about how sure a model may be.
    """
    return samples / (samples + PRIOR_SAMPLES)


def calibrated(sharpnesses: Sequence[float], probability: Tensor, weight: Tensor | None = None) -> Calibrated:
    """Return the most probable of G sharpnesses; of equal ones the first. The prior of log sharpness is normal about 0.

    Args:
        sharpnesses: The G sharpnesses.
        probability: The probabilities of the right labels with each sharpness, (G, V) or (G, V, T).
        weight: Same as in `log_likelihoods`.
    """
    log_G = torch.tensor(sharpnesses, dtype=torch.float64).log()
    samples = probability.shape[1] if weight is None else float(weight.sum())
    posterior_G = log_likelihoods(probability, weight) - 0.5 * (log_G / spread(samples)).square()
    best = int(posterior_G.argmax())
    return Calibrated(sharpnesses[best], probability[best])
