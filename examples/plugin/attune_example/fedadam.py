"""FedAdam: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive Federated Optimization", ICLR 2021."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from attune.common.exchange.transform import PartUpdate
from attune.fedserver.lab.aggregators.base import IN_TURN, Block, Carrier, Put, Tensors, Vault, write
from attune.fedserver.lab.aggregators.mean import VALUE, SharedValue
from attune_example.settings import FedAdamSettings

FIRST, SECOND = "first-moment", "second-moment"  # keys of the vault


class FedAdam(SharedValue):
    """One step of Adam on the server for each round, along the mean change of the cohort (Algorithm 2).

    delta = sum_i (m_i / M) x_i - x; m <- b1 m + (1 - b1) delta; v <- b2 v + (1 - b2) delta^2; x <- x + eta m / (sqrt(v) + tau).
    Memory: one tensor of one update, its running sum, and x, m and v of this tensor.
    """

    keys = (VALUE, FIRST, SECOND)

    def __init__(
        self,
        settings: FedAdamSettings,
        vault: Vault,
        seed: int,
        components: Mapping[str, list[str]],
        carrier: Carrier = IN_TURN,
    ) -> None:
        super().__init__(settings, vault, seed, components, carrier)
        self._settings = settings

    def start(self, initial: Mapping[str, torch.Tensor]) -> None:
        """Write the state before round 1: m = 0 and v = tau^2, the smallest that the paper allows."""
        super().start(initial)
        smallest = self._settings.adaptivity**2
        write(self._vault, FIRST, {name: torch.zeros_like(tensor) for name, tensor in initial.items()})
        write(self._vault, SECOND, {name: torch.full_like(tensor, smallest) for name, tensor in initial.items()})

    def apply(self, block: Block, combined: Tensors, updates: Sequence[PartUpdate]) -> Iterator[Put]:
        """Yield x, m and v of each tensor of the block. Integers, such as counters of batches, take their mean."""
        states = [self._vault.read(key) for key in self.keys]
        for name in block.names:
            x, m, v = (state[name] for state in states)
            if x.is_floating_point():
                delta = combined[name] - x
                m = self._settings.beta1 * m + (1 - self._settings.beta1) * delta
                v = self._settings.beta2 * v + (1 - self._settings.beta2) * delta.square()
                x = x + self._settings.server_lr * m / (v.sqrt() + self._settings.adaptivity)
            else:
                x = combined[name]
            yield from ((key, name, value) for key, value in zip(self.keys, (x, m, v), strict=True))
