"""How sure a model may be of itself: one temperature, by the samples held out of training.

A model that has trained on a few samples alone gives its answers probabilities near 1; a mean of many models, or one of a few
rounds, hardly any above the rest. Both may be right equally often. So before models are compared by likelihood, or their
probabilities are averaged, each one's scores are multiplied by its own sharpness, which changes no answer of a model alone:
temperature scaling (Guo, Pleiss, Sun, Weinberger: On Calibration of Modern Neural Networks, ICML 2017, section 4.2), with a
prior, because few samples are held out. V held-out samples, T labels of a sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

SPREAD = 0.8  # prior standard deviation of log sharpness: 95 % between a fifth and five
FLOOR = 1e-6  # of a probability: a model may be certain and wrong once without being ruled out
SHARPNESSES = tuple(math.exp(step * SPREAD / 4) for step in range(-12, 13))  # three deviations to both sides, in steps of 22 %


class Calibrated(NamedTuple):
    """sharpness: by what scores are multiplied, an inverse temperature. probability: of the right labels then, (V,), (V, T)."""

    sharpness: float
    probability: Tensor


def log_likelihood(probability: Tensor) -> float:
    """Of V samples, from what their right labels are given, (V,) or (V, T); a sequence counts as one sample."""
    p_VT = probability.double().reshape(len(probability), -1).clamp_min(FLOOR)
    return float(p_VT.log().mean(dim=1).sum())


def calibrated(sharpnesses: Sequence[float], probabilities: Sequence[Tensor]) -> Calibrated:
    """The likeliest sharpness a posteriori.

    probabilities: with each sharpness, what the right labels are given, (V,) or (V, T). The prior of log sharpness is normal
    about 0 with SPREAD as its standard deviation.
    """

    def posterior(sharpness: float, probability: Tensor) -> float:
        return log_likelihood(probability) - 0.5 * (math.log(sharpness) / SPREAD) ** 2

    scores = [posterior(*each) for each in zip(sharpnesses, probabilities, strict=True)]
    best = int(torch.tensor(scores, dtype=torch.float64).argmax())
    return Calibrated(sharpnesses[best], probabilities[best])
