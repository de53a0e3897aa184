"""The prior with which a device weighs its models, estimated from the other devices (empirical Bayes).

A device weighs the common model, its own model and one that it trained alone. It does so by the samples that it held out of
training. A few samples say little about one device, but those of all devices say much: a model that helped no other device will
hardly help this one. So each device reports the log-likelihood of its held-out samples under each model. With the next
evaluation the server sends each device the shares of the other devices whose samples each model explains (Robbins: An
Empirical Bayes Approach to Statistics, 3rd Berkeley Symposium, 1956). The device's own report is left out, since the device
adds its own samples itself.

The models that devices fit alone are many, and all a device's samples tell them apart. So there each device reports the weights
that it found itself, and the prior is their mean over the other devices.

D devices, K models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from attune.common.metrics import CHOICES, Choice, prior_shares
from attune.fedserver.core.records import Report

ITERATIONS = 500  # at most; a tenth is enough for tens of devices
STEADY = 1e-9  # largest change of a share in the last iteration
FEW = 100  # with more devices, leaving out one vote makes no difference
VOTES = 1.0  # pseudo-votes for a model, on average: no model is ruled out, and few devices move the shares little

Array = npt.NDArray[Any]
Shares = dict[str, float]  # by model: > 0; those of CHOICES have the sum 1, and so have those of fitted models


class Prior(msgspec.Struct, frozen=True):
    """Shares of devices that each model explains best.

    Attributes:
        shares: Shares from all devices; empty without reports.
        without: Shares from all other devices, for each device that voted. Empty for more than FEW devices.
    """

    shares: Mapping[str, float]
    without: Mapping[str, Mapping[str, float]]

    def of(self, device: str) -> Mapping[str, float]:
        """Return the shares from the other devices, for this device."""
        return self.without.get(device, self.shares)


NO_PRIOR = Prior({}, {})


def votes_of(rows: Iterable[Report]) -> dict[str, dict[Choice, float]]:
    """Return the log-likelihoods by model of each device (by name) that has weighed several models."""
    votes = {row.client: row.likelihoods for row in rows}
    return {client: vote for client, vote in votes.items() if len(vote) > 1}


def fitted_of(rows: Iterable[Report]) -> dict[str, dict[str, float]]:
    """Return the weights of fitted models of each device (by name) that has found any. A device's weights sum to 1 at most."""
    claimed = {row.client: row.fitted for row in rows if row.fitted}
    return {device: {name: w / max(1.0, sum(of.values())) for name, w in of.items()} for device, of in claimed.items()}


def prior_of(
    votes: Mapping[str, Mapping[Choice, float]], fitted: Mapping[str, Mapping[str, float]] = MappingProxyType({})
) -> Prior:
    """Estimate the shares of the models, and the mean weights of fitted ones.

    Model: one of the models that a device has explains its held-out samples; it is model k with probability share_k among
    those that the device has (Luce's choice axiom). So a device that lacks a model does not vote against it. The shares
    maximise the posterior. They are found by expectation maximisation, with the step of Hunter (MM Algorithms for Generalized
    Bradley-Terry Models, Annals of Statistics 32, 2004, section 5) for the maximum. Each device has one vote, whatever it
    claims; a device that sees no difference between its models does not change the shares.

    The shares without one device start from the shares of all. With more than FEW devices, each device's own vote stays in.

    Args:
        votes: Log-likelihood (nats) of each device's held-out samples under each model that it has.
        fitted: Weights of each device's fitted models among themselves.
    """
    prior, means = _shares_of(votes), _means(fitted.values())
    if not means:
        return prior
    few = {*votes, *fitted} if len({*votes, *fitted}) <= FEW else ()
    without = {device: {**prior.of(device), **_means(of for other, of in fitted.items() if other != device)} for device in few}
    return Prior({**prior.shares, **means}, without)


def _means(weights: Iterable[Mapping[str, float]]) -> Shares:
    """Return the mean weight of each fitted model over the devices, with the sum 1."""
    sums: Shares = {}
    for of in weights:
        for name, weight in of.items():
            sums[name] = sums.get(name, 0.0) + weight
    total = math.fsum(sums.values())
    return {name: share / total for name, share in sorted(sums.items()) if share > 0}


def _shares_of(votes: Mapping[str, Mapping[Choice, float]]) -> Prior:
    """Return the shares of networks and of the fitted models together, as `prior_of`."""
    names = [model for model in CHOICES if any(model in vote for vote in votes.values())]
    if not names:
        return NO_PRIOR
    log_DK = np.array([[vote.get(name, -np.inf) for name in names] for vote in votes.values()])
    with np.errstate(over="ignore"):  # the largest float64 minus its negative
        likely_DK = np.exp(log_DK - log_DK.max(axis=1, keepdims=True))
    has_DK = np.isfinite(log_DK)

    def shares(voters: Array | slice, start_K: Array) -> Array:
        return _likeliest(likely_DK[voters], has_DK[voters], start_K, before_K)

    before_K = np.array(list(prior_shares(names).values()))
    all_K = shares(slice(None), before_K)
    places = np.arange(len(votes))
    without = {device: shares(places != place, all_K) for place, device in enumerate(votes)} if len(votes) <= FEW else {}
    return Prior(_named(names, all_K), {device: _named(names, share_K) for device, share_K in without.items()})


def _likeliest(likely_DK: Array, has_DK: Array, share_K: Array, before_K: Array) -> Array:
    """Return the shares (K,) of highest posterior, starting from `share_K`, with the prior mean `before_K`."""
    pseudo_K = len(share_K) * VOTES * before_K
    for _ in range(ITERATIONS):
        vote_DK = share_K * likely_DK
        votes_K = (vote_DK / vote_DK.sum(axis=1, keepdims=True)).sum(axis=0) + pseudo_K
        against_K = (has_DK / (has_DK @ share_K)[:, None]).sum(axis=0) + pseudo_K.sum()
        last_K, share_K = share_K, votes_K / against_K
        share_K /= share_K.sum()
        if np.abs(share_K - last_K).max() <= STEADY:
            break
    return share_K


def _named(names: list[Choice], share_K: Array) -> Shares:
    return dict(zip(names, share_K.tolist(), strict=True))
