"""One embedding per client, stored by name, with its optimiser state: it grows as devices enrol.

Shapes: N clients known, S asked for, E numbers of an embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from attune.common.seeds import derive
from attune.fedserver.lab.aggregators.base import Tensors
from attune.fedserver.lab.aggregators.names import from_tensor, to_tensor
from attune.fedserver.lab.aggregators.optimisers import Optimiser
from attune.fedserver.lab.aggregators.stored import EMBEDDED, STEPS


class Embeddings:
    """z_i by client name. Whoever is not in a cohort is untouched by its step: no momentum, no decay."""

    def __init__(self, seed: int, dim: int, dtype: torch.dtype, moments: Sequence[str]) -> None:
        self._seed, self._dim, self._dtype = seed, dim, dtype
        self._kinds = ("value", *moments)
        self._rows: dict[str, list[torch.Tensor]] = {}  # client -> its value, then its moments, each (E)
        self._steps: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"Embeddings({len(self._rows)} clients, {sum(map(bool, self._steps.values()))} trained)"

    def __contains__(self, client: str) -> bool:
        return client in self._rows

    def admit(self, client: str, founder: bool) -> None:
        """Add a client.

        Until its embedding is trained, a founder has a draw from N(0, 1), and a later client the mean of the trained ones. The
        embedding depends on the client's name and on what has been trained, so a restart gives the same. Founders at the mean
        would all be equal to the network. While none is trained, all have draws.
        """
        if self._steps.get(client):
            return
        value_E = self.mean() if not founder and self._trained() else self._drawn(client)
        self._rows[client] = [value_E, *(torch.zeros_like(value_E) for _ in self._kinds[1:])]
        self._steps[client] = 0

    def _drawn(self, client: str) -> torch.Tensor:
        draw = torch.Generator().manual_seed(derive(self._seed, "embedding", client))
        return torch.randn(self._dim, generator=draw, dtype=torch.float64).to(self._dtype)

    def mean(self) -> torch.Tensor:
        """Return the mean of the trained embeddings, (E); zero without any."""
        trained = self._trained()
        return self.values(trained).mean(dim=0) if trained else torch.zeros(self._dim, dtype=self._dtype)

    def _trained(self) -> list[str]:
        return [name for name in sorted(self._rows) if self._steps[name]]

    def values(self, clients: Sequence[str]) -> torch.Tensor:
        """Return embeddings (S, E) in the given order.

        Raises:
            KeyError: A client was never admitted.
        """
        return torch.stack([self._rows[client][0] for client in clients])

    def step(self, clients: Sequence[str], gradient_SE: torch.Tensor, optimiser: Optimiser) -> None:
        """Take one step of each client's own optimiser."""
        for client, gradient_E in zip(clients, gradient_SE, strict=True):
            self._steps[client] += 1
            value_E, *moments = self._rows[client]
            optimiser.dense_(value_E, gradient_E, moments, self._steps[client])

    def tensors(self) -> Tensors:
        """Return everything to save: the names as JSON in bytes, then (N, E) of each kind, and the N step counters."""
        names = sorted(self._rows)
        result = {EMBEDDED: to_tensor(names)}
        for k, kind in enumerate(self._kinds):
            rows = [self._rows[name][k] for name in names]
            result[f"embedding.{kind}"] = torch.stack(rows) if rows else torch.empty(0, self._dim, dtype=self._dtype)
        result[STEPS] = torch.tensor([self._steps[name] for name in names], dtype=torch.int64)
        return result

    def load(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Load what `tensors` returned."""
        names = from_tensor(saved[EMBEDDED])
        kinds_NE = [saved[f"embedding.{kind}"] for kind in self._kinds]
        self._rows = {name: [kind_NE[i].clone() for kind_NE in kinds_NE] for i, name in enumerate(names)}
        self._steps = dict(zip(names, saved[STEPS].tolist(), strict=True))
