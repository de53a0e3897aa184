"""Weights of a device's models, by samples that a model was not trained on and by what other devices mixture.

V held-out samples, T labels of a sample.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from attune.common.metrics import Choice
from attune.fedclient.data.prepare import Prepared
from attune.fedclient.work.baselines import Candidates
from attune.fedclient.work.blend import NOTHING, Member, Weighing, unweighed
from attune.fedclient.work.calibration import Calibrated, log_likelihood
from attune.fedclient.work.executor import Jobs
from attune.fedclient.work.portfolio.portfolio import Portfolio

LEAST_WEIGHT = 0.02  # of a model in a blend with fitted models; the others are weighed again without it
# Weight of the fitted models together, where no sample can weigh them against networks and no other device has said anything.
UNKNOWN_SHARE = 1 / 2

Fits = Mapping[str, Calibrated]


class Weighed(NamedTuple):
    """Weights of a device's models, and what they were found from.

    Attributes:
        members: The models of the blend; empty if the device keeps its own model alone.
        likelihood: Log-likelihood of the held-out samples under each network, and under the fitted models together ("alone"),
            nats; empty without such samples.
        probability: Probability of each held-out sample's label under each of these, (V,) or (V, T); empty likewise.
        fitted: Weights of the fitted models by this device's own samples, for the prior of others.
    """

    members: dict[str, Member]
    likelihood: dict[str, float]
    probability: Mapping[str, torch.Tensor] = MappingProxyType({})
    fitted: Mapping[str, float] = MappingProxyType({})


def weighed(
    candidates: Candidates,
    own_choice: Choice,
    data: Prepared,
    prior: Mapping[str, float],
    portfolio: Portfolio | None = None,
    fits: Fits | None = None,
) -> Jobs[Weighed]:
    """Weigh networks and fitted models.

    The fitted models are weighed among themselves by all training samples, each predicted out of fold. Together they are one
    model beside the networks, which are weighed by the held-out samples.

    Args:
        candidates: The networks.
        own_choice: The model that the method leads to.
        data: The device's samples.
        prior: What other devices found, as in blend.pseudo_counts.
        portfolio: The fitted models; None: there are none.
        fits: How likely samples are under the networks, where these were predicted out of fold, too. None: networks are weighed
            by the held-out samples.
    """
    if len(candidates) == 1 and portfolio is None:
        return Weighed({}, {})
    weight = data.validation_weight if fits is None else None
    if fits is None and len(data.validation_x):
        fits = {}
        for name, (trainer, tensors) in candidates.items():
            fits[name] = yield from trainer.calibrated(tensors, data.validation_x, data.validation_y, weight)
    if fits is None:
        members = yield from unweighed(candidates, own_choice, data.train_x, data.train_y, prior)
        if portfolio is None:
            return Weighed(members, {})
        return (yield from _beside(portfolio, members, candidates, own_choice, prior))
    # The scores of a model that diverged would make every answer of a blend NaN.
    fits = {name: fit for name, fit in fits.items() if fit.probability.isfinite().all()}
    if portfolio is None and (not fits or list(fits) == [own_choice]):
        return Weighed({}, {})
    mixture = yield from _mixed(fits, portfolio, weight, prior)
    likelihood = {name: log_likelihood(p, weight) for name, p in mixture.probability.items()}
    if portfolio is None:
        return Weighed(_members(mixture.weights, candidates, fits, None), likelihood, mixture.probability)
    if "alone" not in mixture.probability:
        members = _members(mixture.weights, candidates, fits, None)
        rest = yield from _beside(portfolio, members, candidates, own_choice, prior)
        return rest._replace(likelihood=likelihood, probability=mixture.probability)
    own_shares = yield from _shares(portfolio, portfolio.candidates, NOTHING)
    if enough := {name for name, weight in mixture.weights.items() if weight >= LEAST_WEIGHT}:
        again = yield from _mixed(fits, portfolio, weight, prior, enough)
        mixture = again._replace(probability=mixture.probability)
    return Weighed(_members(mixture.weights, candidates, fits, portfolio), likelihood, mixture.probability, own_shares)


class _Mixture(NamedTuple):
    """Weights of all models by name, and the probabilities that they were found from, as in Weighed."""

    weights: dict[str, float]
    probability: dict[str, torch.Tensor]


def _mixed(
    fits: Fits,
    portfolio: Portfolio | None,
    weight: torch.Tensor | None,
    prior: Mapping[str, float],
    among: Collection[str] | None = None,
) -> Jobs[_Mixture]:
    """Return the weights of networks and fitted models, of all or of those that are named."""
    probability = {name: fit.probability for name, fit in fits.items() if among is None or name in among}
    shares: dict[str, float] = {}
    if portfolio is not None and portfolio.fits:
        names = [name for name in portfolio.candidates if among is None or name in among]
        shares = (yield from _shares(portfolio, names, prior)) if names else {}
        together = portfolio.held_out(shares) if shares else None
        if together is not None:
            probability["alone"] = together
    if len(probability) > 1:
        weights: dict[str, float] = yield Weighing(probability, prior, weight)
    else:
        weights = dict.fromkeys(probability, 1.0)
    alone = weights.pop("alone", 0.0)
    return _Mixture(weights | {name: alone * share for name, share in shares.items() if alone}, probability)


def _shares(portfolio: Portfolio, names: Collection[str], prior: Mapping[str, float]) -> Jobs[dict[str, float]]:
    """Return the weights of these fitted models among themselves, by the device's own samples and the prior.

    Without samples that tell them apart the prior decides alone, and without a prior they are equal.
    """
    if len(names) > 1 and portfolio.fits:
        shares: dict[str, float] = yield Weighing({name: portfolio.fits[name].probability for name in names}, prior)
        return shares
    known = {name: prior.get(name, 0.0) for name in names}
    total = sum(known.values())
    return {name: share / total if total else 1 / len(known) for name, share in known.items()}


def _beside(
    portfolio: Portfolio, members: Mapping[str, Member], candidates: Candidates, own_choice: Choice, prior: Mapping[str, float]
) -> Jobs[Weighed]:
    """Return the blend of networks and fitted models that no sample of the device can weigh against each other.

    The share of the fitted models is that of devices which they explain best.
    """
    networks = members or {own_choice: Member(1.0, *candidates[own_choice])}
    shares = yield from _shares(portfolio, portfolio.candidates, prior)
    own_shares = (yield from _shares(portfolio, portfolio.candidates, NOTHING)) if portfolio.fits else {}
    alone = prior.get("alone", UNKNOWN_SHARE)
    weights = {name: (1 - alone) * member.weight for name, member in networks.items()}
    weights |= {name: alone * share for name, share in shares.items()}
    enough = {name: weight for name, weight in weights.items() if weight >= LEAST_WEIGHT}
    total = sum(enough.values())
    fits = {name: Calibrated(member.sharpness, torch.empty(0)) for name, member in networks.items()}
    return Weighed(
        _members({name: weight / total for name, weight in enough.items()}, candidates, fits, portfolio), {}, fitted=own_shares
    )


def _members(
    weights: Mapping[str, float], candidates: Candidates, fits: Fits, portfolio: Portfolio | None
) -> dict[str, Member]:
    """Return the models with these weights as members of a blend."""
    known, sharpness = dict(candidates), {name: fit.sharpness for name, fit in fits.items()}
    if portfolio is not None:
        known |= portfolio.candidates
        sharpness |= {name: fit.sharpness for name, fit in portfolio.fits.items()}
    return {name: Member(weight, *known[name], sharpness.get(name, 1.0)) for name, weight in weights.items()}
