"""Embedding of a device before its first update, from what it and the trained devices say of their data.

Kernel regression of Nadaraya and Watson (1964). What the network makes for the device, before its heads, is to be the mean of
what it makes for the trained devices, by how near their descriptions are: w_i ~ exp(-|d - d_i|^2 / (2 (b m)^2)), with m the
median distance of two trained devices. The device's embedding is fitted to that. A mean of embeddings would be worse, as those
far apart may mean the same. The bandwidth b is chosen by leaving out one trained device after the other. The numbers of a
description are standardised over the trained devices.

Shapes: N trained devices, M numbers of a description, E numbers of an embedding, H numbers of the network's output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from attune.common.models.feature_mean import description_size
from attune.fedserver.core.scale import LARGEST

if TYPE_CHECKING:
    from attune.fedserver.lab.aggregators.hypernetwork import Hypernetwork

BANDWIDTHS = (0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 2.0)  # in medians of the distances
FEWEST_DESCRIBED = 5  # trained devices with a description; with fewer there is no neighbourhood to speak of
MOST_USED = 1_000  # trained devices whose embeddings are used, so that all pairs fit in memory
FIT_STEPS, FIT_RATE = 100, 0.1  # of Adam, for an embedding that gives the wanted output
_ALIKE = 1e-9  # a deviation below this is that of equal numbers


class DescriptionRegression:
    """Regression of the network's output on descriptions, with the bandwidth that serves the trained devices best.

    Args:
        descriptions_NM: Descriptions of the trained devices, float64.
        z_NE: Their embeddings.
        emitted: What the network makes of embeddings: (N, E) -> (N, H).
    """

    def __init__(
        self, descriptions_NM: torch.Tensor, z_NE: torch.Tensor, emitted: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        deviation_M = descriptions_NM.std(dim=0, correction=0)
        self._mean_M, self._deviation_M = descriptions_NM.mean(dim=0), deviation_M.where(deviation_M > _ALIKE, 1.0)
        self._z_NE, self._known_NM = z_NE, self._standardised(descriptions_NM)
        self._emitted, self._output_NH = emitted, emitted(z_NE)
        distance_NN = _distances(self._known_NM, self._known_NM)
        rows, columns = torch.triu_indices(len(z_NE), len(z_NE), offset=1)
        self._median = float(distance_NN[rows, columns].median()) or 1.0
        self.bandwidth = min(BANDWIDTHS, key=lambda bandwidth: self._error(distance_NN, bandwidth))

    def output(self, description_M: torch.Tensor) -> torch.Tensor:
        """Return what the network should make for a device with this description, (H)."""
        return self._weights(description_M) @ self._output_NH

    def mean_embedding(self, description_M: torch.Tensor) -> torch.Tensor:
        """Return the mean of the embeddings (E), weighted likewise."""
        return self._weights(description_M) @ self._z_NE

    def embedding(self, description_M: torch.Tensor) -> torch.Tensor:
        """Return the embedding (E) that gives this output, as nearly as `fitted` finds it from the mean of embeddings."""
        return fitted(self._emitted, self.mean_embedding(description_M), self.output(description_M))

    def _error(self, distance_NN: torch.Tensor, bandwidth: float) -> float:
        """Return the squared error of the outputs of trained devices, each from all the others."""
        others_NN = distance_NN.clone().fill_diagonal_(torch.inf)
        return float((self._mixing(others_NN, bandwidth) @ self._output_NH - self._output_NH).double().square().sum())

    def _weights(self, description_M: torch.Tensor) -> torch.Tensor:
        distance_1N = _distances(self._standardised(description_M[None]), self._known_NM)
        return self._mixing(distance_1N, self.bandwidth)[0]

    def _standardised(self, descriptions_NM: torch.Tensor) -> torch.Tensor:
        return (descriptions_NM - self._mean_M) / self._deviation_M

    def _mixing(self, distance_SN: torch.Tensor, bandwidth: float) -> torch.Tensor:
        return torch.softmax((distance_SN / (bandwidth * self._median)).square() / -2, dim=1).to(self._z_NE.dtype)


def evenly(names: Sequence[str]) -> Sequence[str]:
    """Return at most MOST_USED of the names, evenly chosen."""
    return names[:: max(1, -(-len(names) // MOST_USED))]


def fitted(emitted: Callable[[torch.Tensor], torch.Tensor], start_E: torch.Tensor, wanted_H: torch.Tensor) -> torch.Tensor:
    """Return an embedding (E) whose output is near `wanted_H`: FIT_STEPS steps of Adam from `start_E`, or that if it is nearer.

    Args:
        emitted: What the network makes of embeddings: (N, E) -> (N, H).
        start_E: The embedding to start from.
        wanted_H: The output that is wanted.
    """

    def error() -> torch.Tensor:
        return (emitted(z_E[None])[0] - wanted_H).square().sum()

    z_E = start_E.clone().requires_grad_()
    adam = torch.optim.Adam([z_E], lr=FIT_RATE)
    with torch.enable_grad():
        first = error().detach()
        for _ in range(FIT_STEPS):
            adam.zero_grad()
            error().backward()
            adam.step()
        return z_E.detach() if error() < first else start_E


def _distances(a_SM: torch.Tensor, b_NM: torch.Tensor) -> torch.Tensor:
    """Return all distances (S, N) without the shortcut by inner products, which would lose small ones."""
    return torch.cdist(a_SM, b_NM, compute_mode="donot_use_mm_for_euclid_dist")


class ToldDescriptions:
    """Descriptions that devices have sent to this process. Aggregators that are made again are told of them again.

    Args:
        model: The model, whose head says how many numbers a description has.
    """

    def __init__(self, model: nn.Module) -> None:
        self._size = description_size(model)
        self._listener: Hypernetwork | None = None  # the newest aggregator whose embeddings start from descriptions
        self.by_client: dict[str, Sequence[float]] = {}

    def take(self, descriptions: Mapping[str, Sequence[float]]) -> bool:
        """Note descriptions by client, and return whether all have the form of the model's; one of another form is ignored."""
        fitting = {
            client: said
            for client, said in descriptions.items()
            if len(said) == self._size and all(abs(number) <= LARGEST for number in said)
        }
        for client, said in fitting.items():
            self.by_client[client] = said
            if self._listener is not None:
                self._listener.describe(client, said)
        return len(fitting) == len(descriptions)

    def tell(self, listener: Hypernetwork) -> None:
        """Tell a new aggregator what was told, and from now on what devices say."""
        self._listener = listener
        for client, said in self.by_client.items():
            listener.describe(client, said)
