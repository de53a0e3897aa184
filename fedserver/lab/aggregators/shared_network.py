"""FedTP's hypernetwork with the embeddings on the devices: one value for all, which descends on the gradients they hand in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from attune.common.exchange.transform import PartUpdate
from attune.common.methods.hypernetwork import computes_in, heads_of, initialise, on_wire, optimiser_of
from attune.common.methods.settings.aggregators import HypernetworkSettings
from attune.common.seeds import derive
from attune.fedserver.lab.aggregators.base import cohort, write
from attune.fedserver.lab.aggregators.mean import VALUE, SharedValue

STEP = "step"
WEIGHT = "weight"  # the metric of a round from which devices learn their share in it


class SharedNetwork(SharedValue):
    """phi descends on sum_i (m_i / M) g_i, where device i computes g_i = (dW_i/dphi)^T (-Delta_i) itself (FedTP eq. 7-10).

    The server needs the sum alone, so it can be a secure one. Devices step their embeddings (`fedclient.work.embedding`).
    """

    _settings: HypernetworkSettings

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._optimiser = optimiser_of(self._settings)
        self.keys = (VALUE, *self._optimiser.moments)

    def start(self, initial: Mapping[str, torch.Tensor]) -> None:
        """Write the network that the server would start with if it had the embeddings."""
        heads, seed = heads_of(initial, self._components), derive(self._seed, "hypernetwork")
        network = on_wire(initialise(self._settings, heads, initial, computes_in(initial), seed))
        super().start(network)
        for key in self._optimiser.moments:
            write(self._vault, key, {name: torch.zeros_like(tensor) for name, tensor in network.items()})
        self._write_step(0)

    def close_round(self, updates: Sequence[PartUpdate]) -> dict[str, float]:
        """Take one step along the cohort's mean gradient. The metric is M."""
        counted = cohort(updates)
        if not counted:
            return {}
        super().close_round(counted)
        self._write_step(self._step + 1)
        return {WEIGHT: sum(update.weight for update in counted)}

    def apply(self, name: str, mean: torch.Tensor) -> Mapping[str, torch.Tensor]:
        value, *moments = (self._vault.read(key)[name].clone() for key in self.keys)
        self._optimiser.dense_(value, mean, moments, self._step + 1)
        return dict(zip(self.keys, (value, *moments), strict=True))

    @property
    def _step(self) -> int:
        """The number of steps that the present network has taken."""
        return int(self._vault.read(STEP)[STEP])

    def _write_step(self, step: int) -> None:
        write(self._vault, STEP, {STEP: torch.tensor(step, dtype=torch.int64)})
