"""The prior with which a device weighs its models, estimated from the other devices (empirical Bayes).

A device weighs the common model, its own model and one that it trained alone. It does so by the samples that it held out of
training. A few samples say little about one device, but those of all devices say much: a model that helped no other device will
hardly help this one. So each device reports the log-likelihood of its held-out samples under each model. With the next
evaluation the server sends each device the shares of the other devices whose samples each model explains (Robbins: An
Empirical Bayes Approach to Statistics, 3rd Berkeley Symposium, 1956). The device's own report is left out, since the device
adds its own samples itself.

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

ITERATIONS = 500  # at most; a tenth is enough for tens of devices
STEADY = 1e-9  # largest change of a share in the last iteration
FEW = 100  # with more devices, leaving out one vote makes no difference
VOTES = 1.0  # pseudo-votes for each model: no model is ruled out, and few devices move the shares little

Array = npt.NDArray[Any]
Shares = dict[Choice, float]  # by model: > 0, with the sum 1


@dataclass(frozen=True)
class Prior:
    """Shares of devices that each model explains best.

    Attributes:
        shares: Shares from all devices; empty without reports.
        without: Shares from all other devices, for each device that voted. Empty for more than FEW devices.
    """

    shares: Mapping[Choice, float]
    without: Mapping[str, Mapping[Choice, float]]

    def of(self, device: str) -> Mapping[Choice, float]:
        """Return the shares from the other devices, for this device."""
        return self.without.get(device, self.shares)


NO_PRIOR = Prior({}, {})


def votes_of(rows: Iterable[Report]) -> dict[str, dict[Choice, float]]:
    """Return the log-likelihoods by model of each device (by name) that has weighed several models."""
    votes = {row.client: row.likelihoods for row in rows}
    return {client: vote for client, vote in votes.items() if len(vote) > 1}


def prior_of(votes: Mapping[str, Mapping[Choice, float]]) -> Prior:
    """Estimate the shares of the models.

    Model: one of the models that a device has explains its held-out samples; it is model k with probability share_k among
    those that the device has (Luce's choice axiom). So a device that lacks a model does not vote against it. The shares
    maximise the posterior. They are found by expectation maximisation, with the step of Hunter (MM Algorithms for Generalized
    Bradley-Terry Models, Annals of Statistics 32, 2004, section 5) for the maximum. Each device has one vote, whatever it
    claims; a device that sees no difference between its models does not change the shares.

    The shares without one device start from the shares of all. With more than FEW devices, each device's own vote stays in.

    Args:
        votes: Log-likelihood (nats) of each device's held-out samples under each model that it has.
    """
    names = [model for model in CHOICES if any(model in vote for vote in votes.values())]
    if not names:
        return NO_PRIOR
    log_DK = np.array([[vote.get(name, -np.inf) for name in names] for vote in votes.values()])
    with np.errstate(over="ignore"):  # the largest float64 minus its negative
        likely_DK = np.exp(log_DK - log_DK.max(axis=1, keepdims=True))
    has_DK = np.isfinite(log_DK)

    def shares(voters: Array | slice, start_K: Array) -> Array:
        return _likeliest(likely_DK[voters], has_DK[voters], start_K)

    all_K = shares(slice(None), np.full(len(names), 1.0 / len(names)))
    places = np.arange(len(votes))
    without = {device: shares(places != place, all_K) for place, device in enumerate(votes)} if len(votes) <= FEW else {}
    return Prior(_named(names, all_K), {device: _named(names, share_K) for device, share_K in without.items()})


def _likeliest(likely_DK: Array, has_DK: Array, share_K: Array) -> Array:
    """Return the shares (K,) of highest posterior, starting from `share_K`."""
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
