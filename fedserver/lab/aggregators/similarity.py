"""FedAMP and HeurFedAMP: one value per client, mixed by how alike whole models are (Huang et al., AAAI 2021).

The part is one unit: every client has one row of weights for all of its tensors. Shapes: S clients of the cohort.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attune.common.exchange.transform import PartUpdate
from attune.common.methods.settings.aggregators import AmpSettings, HeurAmpSettings
from attune.fedserver.lab.aggregators.attention import EXACT_SIGMA, cosines, with_self_weight
from attune.fedserver.lab.aggregators.mixing import Mixing


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
