"""What the fleet's devices found of their models, as what each begins from when it weighs its own: empirical Bayes.

A device weighs the common model, its own and one that it trained alone by the samples that it held out of training. Six samples
say little, but those of all devices together do: a model that is of no use to any of them is hardly of use to the next. So each
device reports how likely its held-out samples are under each model, and with the next evaluation it is told the shares of
devices whose samples each model explains (Robbins: An Empirical Bayes Approach to Statistics, 3rd Berkeley Symposium, 1956).

D devices, K models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from attune.common.metrics import CHOICES, Choice
from attune.fedserver.core.records import Row

ITERATIONS = 500  # converged to about 1e-9 for tens of devices; each iteration is D * K numbers
VOTES = 1.0  # of each model beforehand, as many devices: no model is ruled out, and few devices say little


def likelihoods_of(rows: Iterable[Row]) -> list[dict[Choice, float]]:
    """Log-likelihoods by model, of each device that has weighed several."""
    said = [{model: getattr(row, f"likelihood_{model}") for model in CHOICES} for row in rows]
    known = [{model: value for model, value in each.items() if value is not None} for each in said]
    return [each for each in known if len(each) > 1]


def prior_of(found: Sequence[Mapping[Choice, float]]) -> dict[Choice, float]:
    """The share of each model that any device has, > 0, summing to 1. Empty without devices.

    found: of each device, the log-likelihood (nats) of its held-out samples under each model that it has. One of them explains
    its samples: model k with probability share_k among those that it has (Luce's choice axiom), so that who lacks a model says
    nothing against it. Shares are the likeliest a posteriori; the method is expectation maximisation, with the step of Hunter
    (MM Algorithms for Generalized Bradley-Terry Models, Annals of Statistics 32, 2004, section 5) for the maximum. A device has
    one vote, whatever it claims; one that sees no difference votes as the others do.
    """
    names = [model for model in CHOICES if any(model in each for each in found)]
    if not names:
        return {}
    log_DK = np.array([[each.get(name, -np.inf) for name in names] for each in found])
    has_DK = np.isfinite(log_DK)
    with np.errstate(over="ignore"):  # of the largest float64 beside its negative
        likely_DK = np.exp(log_DK - log_DK.max(axis=1, keepdims=True))
    share_K = np.full(len(names), 1.0 / len(names))
    for _ in range(ITERATIONS):
        vote_DK = share_K * likely_DK
        votes_K = (vote_DK / vote_DK.sum(axis=1, keepdims=True)).sum(axis=0) + VOTES
        against_K = (has_DK / (has_DK @ share_K)[:, None]).sum(axis=0) + len(names) * VOTES
        share_K = votes_K / against_K
        share_K /= share_K.sum()
    return dict(zip(names, share_K.tolist(), strict=True))
