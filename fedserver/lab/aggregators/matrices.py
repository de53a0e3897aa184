"""Which client learned from which in a round, stored for pictures: the matrices with which an aggregator mixed its cohort.

Shapes: S clients of the cohort.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from attune.fedserver.lab.aggregators.base import Tensors, Vault, write
from attune.fedserver.lab.aggregators.stored import CLIENTS, MATRICES, MEAN, UNIT

LIMIT_BYTES = 16 << 20  # of all matrices together


def names_to_tensor(names: Sequence[str]) -> torch.Tensor:
    """Return names as JSON in bytes, uint8 (length), so that a file of rows names the client of each; see `stored.names_in`."""
    return torch.tensor(list(json.dumps(list(names)).encode()), dtype=torch.uint8)


class Matrices:
    """One round's A of every unit, and their mean. If they exceed LIMIT_BYTES, only the mean is stored, or no matrix."""

    def __init__(self, clients: Sequence[str], units: int) -> None:
        matrix_bytes = 4 * len(clients) ** 2
        self._clients, self._units = list(clients), units
        self._all_fit = matrix_bytes * (units + 1) <= LIMIT_BYTES
        self._mean_fits = matrix_bytes <= LIMIT_BYTES
        self._kept: Tensors = {}

    def add(self, unit: str, A_SS: torch.Tensor) -> None:
        """Add a unit's matrix: A[i, k] is how much of client k's value client i is served; rows sum to one."""
        if self._all_fit:
            self._kept[UNIT + unit] = A_SS.float()
        if self._mean_fits:
            self._kept[MEAN] = self._kept.get(MEAN, torch.zeros(A_SS.shape)) + A_SS.float() / self._units

    def write(self, vault: Vault) -> None:
        """Write the matrices under MATRICES, in place of the last round's."""
        write(vault, MATRICES, {CLIENTS: names_to_tensor(self._clients)} | self._kept)
