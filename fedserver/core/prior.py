"""What the fleet's devices found of their models, as what each begins from when it weighs its own: empirical Bayes.

A device weighs the common model, its own and one that it trained alone by the samples that it held out of training. Six samples
say little, but those of all devices together do: a model that is of no use to any of them is hardly of use to the next. So each
device reports how likely its held-out samples are under each model, and with the next evaluation it is told the shares of the
other devices whose samples each model explains (Robbins: An Empirical Bayes Approach to Statistics, 3rd Berkeley Symposium,
1956). Its own samples it has itself: they would count twice.

D devices, K models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from attune.common.metrics import CHOICES, Choice
from attune.fedserver.core.records import Report

ITERATIONS = 500  # at most; of tens of devices a tenth of them is enough
STEADY = 1e-9  # by how much a share may still move
FEW = 100  # devices, of whom each one's own vote would be felt
VOTES = 1.0  # of each model beforehand, as many devices: no model is ruled out, and few devices say little

Array = npt.NDArray[Any]
Shares = dict[Choice, float]  # of each model that any device has, > 0, summing to 1


@dataclass(frozen=True)
class Prior:
    """shares: by all devices; empty without any.

    without: of each device that voted, the shares by all others; none of very many devices.
    """

    shares: Mapping[Choice, float]
    without: Mapping[str, Mapping[Choice, float]]

    def of(self, device: str) -> Mapping[Choice, float]:
        """What the others found, for this device."""
        return self.without.get(device, self.shares)


NOTHING = Prior({}, {})


def votes_of(rows: Iterable[Report]) -> dict[str, dict[Choice, float]]:
    """Return the log-likelihoods by model of each device (by name) that has weighed several models."""
    votes = {row.client: row.likelihoods for row in rows}
    return {client: vote for client, vote in votes.items() if len(vote) > 1}


def prior_of(found: Mapping[str, Mapping[Choice, float]]) -> Prior:
    """The shares of the models.

    found: of each device, the log-likelihood (nats) of its held-out samples under each model that it has. One of them explains
    its samples: model k with probability share_k among those that it has (Luce's choice axiom), so that who lacks a model says
    nothing against it. Shares are the likeliest a posteriori; the method is expectation maximisation, with the step of Hunter
    (MM Algorithms for Generalized Bradley-Terry Models, Annals of Statistics 32, 2004, section 5) for the maximum. A device has
    one vote, whatever it claims; one that sees no difference votes as the others do.

    Without each device they are found anew, from the shares of all; of more than FEW devices one's own vote is left in.
    """
    names = [model for model in CHOICES if any(model in each for each in found.values())]
    if not names:
        return NOTHING
    log_DK = np.array([[each.get(name, -np.inf) for name in names] for each in found.values()])
    with np.errstate(over="ignore"):  # of the largest float64 beside its negative
        likely_DK = np.exp(log_DK - log_DK.max(axis=1, keepdims=True))
    has_DK = np.isfinite(log_DK)

    def shares(voters: Array | slice, start_K: Array) -> Array:
        return _likeliest(likely_DK[voters], has_DK[voters], start_K)

    all_K = shares(slice(None), np.full(len(names), 1.0 / len(names)))
    places = np.arange(len(found))
    without = {device: shares(places != place, all_K) for place, device in enumerate(found)} if len(found) <= FEW else {}
    return Prior(_named(names, all_K), {device: _named(names, share_K) for device, share_K in without.items()})


def _likeliest(likely_DK: Array, has_DK: Array, share_K: Array) -> Array:
    """The shares (K,), from those given to begin with."""
    models = len(share_K)
    for _ in range(ITERATIONS):
        vote_DK = share_K * likely_DK
        votes_K = (vote_DK / vote_DK.sum(axis=1, keepdims=True)).sum(axis=0) + VOTES
        against_K = (has_DK / (has_DK @ share_K)[:, None]).sum(axis=0) + models * VOTES
        before_K, share_K = share_K, votes_K / against_K
        share_K /= share_K.sum()
        if np.abs(share_K - before_K).max() <= STEADY:
            break
    return share_K


def _named(names: list[Choice], share_K: Array) -> Shares:
    return dict(zip(names, share_K.tolist(), strict=True))
