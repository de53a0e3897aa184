"""One value per client, mixed by how alike the clients are: component by component (FedMCSA), or by whole models (FedAMP).

FedAMP and HeurFedAMP (Huang et al., AAAI 2021) have one unit: every client has one row of weights for all tensors of the part.
Shapes: S clients of the cohort.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from attune.common.exchange.transform import PartUpdate
from attune.common.methods.settings.aggregators import AmpSettings, AttentionSettings, HeurAmpSettings
from attune.fedserver.lab.aggregators.mean import shares_of
from attune.fedserver.lab.aggregators.mixing import Mixing

EXACT_SIGMA = 100.0  # sigma multiplies an error of a cosine: above this, products in float32 would miss 1e-6


class Mcsa(Mixing):
    """A[i,:] = softmax_k(sigma * cos(x_i, x_k)), for every component by itself (FedMCSA eq. 7, errata E1)."""

    _settings: AttentionSettings

    @property
    def exact(self) -> bool:
        return self._settings.sigma > EXACT_SIGMA

    def _groups(self, components: Mapping[str, list[str]]) -> dict[str, list[list[str]]]:
        """Return a unit for each component, or for each tensor."""
        if self._settings.components == "tensor":
            return {name: [[name]] for names in components.values() for name in names}
        return {component: [names] for component, names in components.items()}

    def _weights(self, G_SS: torch.Tensor, updates: Sequence[PartUpdate]) -> torch.Tensor:
        shares_S = None
        if self._settings.weighting == "samples":
            shares_S = torch.tensor(shares_of(updates, uniform=False), dtype=torch.float64)
        if self._settings.self_weight is not None:
            return with_self_weight(cosines(G_SS), self._settings.sigma, self._settings.self_weight)
        if self._settings.equation7 == "printed":
            return attention(cosines(G_SS), self._settings.sigma, shares_S).T.contiguous()
        return attention(cosines(G_SS), self._settings.sigma, shares_S)


def cosines(G_SS: torch.Tensor) -> torch.Tensor:
    """Return cos(x_i, x_k) from inner products, (S, S) float64. The cosine with a zero vector is 0, even with itself."""
    norm_S = G_SS.diagonal().sqrt()
    inverse_S = torch.where(norm_S > 0, 1 / norm_S, 0.0)
    return (G_SS * inverse_S[:, None] * inverse_S).clamp(-1, 1)


def attention(cosine_SS: torch.Tensor, sigma: float, shares_S: torch.Tensor | None = None) -> torch.Tensor:
    """Return the softmax over k of sigma * cos(x_i, x_k), (S, S) float64; every row sums to one.

    With `shares_S` each weight is multiplied by client k's data share, and the row is normalised again (the published code's
    form, erratum E4).
    """
    logits_SS = sigma * cosine_SS
    if shares_S is not None:
        logits_SS = logits_SS + shares_S.log()
    return logits_SS.softmax(dim=1)


def with_self_weight(cosine_SS: torch.Tensor, sigma: float, self_weight: float) -> torch.Tensor:
    """Return `self_weight` on the diagonal and attention over the others, (S, S) float64.

    Every row sums to one, and a cohort of one keeps its value. Of whole models these are HeurFedAMP's weights.
    """
    if len(cosine_SS) == 1:
        return torch.ones_like(cosine_SS)
    others_SS = (sigma * cosine_SS).fill_diagonal_(-torch.inf).softmax(dim=1)
    return ((1 - self_weight) * others_SS).fill_diagonal_(self_weight)


class HeurAmp(Mixing):
    """w_i = a x_i + (1 - a) sum_{k != i} softmax_{k != i}(sigma * cos(x_i, x_k)) x_k, a = `self_weight` (HeurFedAMP)."""

    _settings: HeurAmpSettings

    @property
    def exact(self) -> bool:
        return self._settings.sigma > EXACT_SIGMA

    def _weights(self, G_SS: torch.Tensor, updates: Sequence[PartUpdate]) -> torch.Tensor:
        return with_self_weight(cosines(G_SS), self._settings.sigma, self._settings.self_weight)


class Amp(Mixing):
    """w_i = x_i + step/S sum_k exp(-||x_i - x_k||^2 / sigma) (x_k - x_i) (FedAMP with alpha = step * sigma / S)."""

    from_first = True

    _settings: AmpSettings

    def _weights(self, G_SS: torch.Tensor, updates: Sequence[PartUpdate]) -> torch.Tensor:
        distance_SS = distances(G_SS)
        sigma = median_distance(distance_SS) if self._settings.sigma == "auto" else self._settings.sigma
        return message_passing(distance_SS, sigma, self._settings.step)


def distances(G_SS: torch.Tensor) -> torch.Tensor:
    """Return ||x_i - x_k||^2 from inner products about any origin, (S, S) float64: not negative, zero with itself."""
    square_S = G_SS.diagonal()
    return (square_S[:, None] + square_S - 2 * G_SS).clamp(min=0).fill_diagonal_(0)


def median_distance(distance_SS: torch.Tensor) -> float:
    """Return the median of the squared distances of all pairs (sigma = "auto"); 0 for one client."""
    i, k = torch.triu_indices(len(distance_SS), len(distance_SS), offset=1)
    pairs_P = distance_SS[i, k]
    return float(pairs_P.median()) if len(pairs_P) else 0.0


def message_passing(distance_SS: torch.Tensor, sigma: float, step: float) -> torch.Tensor:
    """Return FedAMP's weights, (S, S) float64: A[i,k] = step/S exp(-d_ik / sigma) for k != i, and the rest of one for A[i,i].

    At step 1 clients that coincide take the plain mean, and one that is far from all keeps its own value. Sigma 0 is its limit:
    only clients that coincide are mixed.
    """
    S = len(distance_SS)
    near_SS = (-distance_SS / sigma).exp() if sigma > 0 else (distance_SS == 0).double()
    A_SS = (step / S * near_SS).fill_diagonal_(0)
    return A_SS + torch.diag(1 - A_SS.sum(dim=1))
