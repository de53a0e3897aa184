"""FedAdam: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive Federated Optimization", ICLR 2021."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from attune.plugin import VALUE, SharedValue, write
from attune_example.settings import FedAdamSettings

FIRST, SECOND = "first-moment", "second-moment"  # keys of the vault


class FedAdam(SharedValue):
    """One step of Adam on the server for each round, along the mean change of the cohort (Algorithm 2).

    delta = sum_i (m_i / M) x_i - x; m <- b1 m + (1 - b1) delta; v <- b2 v + (1 - b2) delta^2; x <- x + eta m / (sqrt(v) + tau).
    Memory: one tensor of one update, its running sum, and x, m and v of this tensor.
    """

    keys = (VALUE, FIRST, SECOND)

    _settings: FedAdamSettings

    def start(self, initial: Mapping[str, torch.Tensor]) -> None:
        """Write the state before round 1: m = 0 and v = tau^2, the smallest that the paper allows."""
        super().start(initial)
        smallest = self._settings.adaptivity**2
        write(self._vault, FIRST, {name: torch.zeros_like(tensor) for name, tensor in initial.items()})
        write(self._vault, SECOND, {name: torch.full_like(tensor, smallest) for name, tensor in initial.items()})

    def apply(self, name: str, mean: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return x, m and v of a tensor. Integers, such as counters of batches, take their mean."""
        x, m, v = (self._vault.read(key)[name] for key in self.keys)
        if not x.is_floating_point():
            return {VALUE: mean, FIRST: m, SECOND: v}
        delta = mean - x
        m = self._settings.beta1 * m + (1 - self._settings.beta1) * delta
        v = self._settings.beta2 * v + (1 - self._settings.beta2) * delta.square()
        return {VALUE: x + self._settings.server_lr * m / (v.sqrt() + self._settings.adaptivity), FIRST: m, SECOND: v}
