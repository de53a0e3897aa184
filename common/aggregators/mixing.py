"""One value per client, mixed on the server out of the cohort's values: what MCSA, HeurFedAMP and FedAMP have in common.

Shapes: S clients of the cohort, D numbers of a group of tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Literal

import torch

from common.aggregators.base import Tensors, Update, Vault, Writer, cohort, write
from common.aggregators.gram import gram, mix_, stack
from common.aggregators.mean import weighted_mean
from common.wire.tensors import Manifest, manifest_of

INITIAL = "initial"


class Mixing:
    """w_i = sum_k A[i,k] x_k for every unit, A made by the subclass from the unit's inner products.

    A unit is a list of groups of tensors: it has one A, and a group is what is in memory at a time, for the whole cohort.
    State is kept by client name, so a client that is not in the cohort keeps its value.
    """

    returns: Literal["values", "change"] = "values"
    exact = False  # whether large inner products are in float64 too
    from_first = False  # whether the inner products are of the differences from the cohort's first client

    def __init__(self, vault: Vault, units: Mapping[str, Sequence[list[str]]]) -> None:
        self._vault = vault
        self._units = dict(units)
        self._manifest: Manifest | None = None
        self._served = {key for key in vault.keys() if key != INITIAL}  # noqa: SIM118 (a vault is not a mapping)

    def _weights(self, G_SS: torch.Tensor, updates: Sequence[Update]) -> torch.Tensor:
        """A, (S, S) in float64 with rows that sum to one, from a unit's inner products (S, S)."""
        raise NotImplementedError

    def start(self, initial: Mapping[str, torch.Tensor]) -> None:
        write(self._vault, INITIAL, initial)

    def admit(self, client: str) -> None:
        """Nothing to keep: until its first round a client is served Theta_0."""

    def slot(self, client: str) -> str | None:
        key = f"client/{client}"
        return key if key in self._served else INITIAL

    def generate(self, clients: Sequence[str]) -> Iterator[tuple[str, Tensors]]:
        """Nobody: every client has a slot."""
        return iter(())

    def close_round(self, updates: Sequence[Update]) -> dict[str, float]:
        """Mixed values of the cohort into the vault. Metric: each unit's mean weight of a client on itself."""
        counted = cohort(updates)
        if not counted:
            return {}
        keys = [f"client/{update.client}" for update in counted]
        if self._manifest is None:
            self._manifest = manifest_of(self._vault.read(INITIAL))
        metrics = {}
        with ExitStack() as opened:
            writers = [opened.enter_context(self._vault.writer(key, self._manifest)) for key in keys]
            for unit, groups in self._units.items():
                A_SS = self._mix(counted, groups, writers)
                metrics[f"self_attention/{unit}"] = float(A_SS.diagonal().mean())
        self._served.update(keys)
        return metrics

    def _mix(self, updates: Sequence[Update], groups: Sequence[list[str]], writers: Sequence[Writer]) -> torch.Tensor:
        """One unit of the whole cohort, read, mixed and written; its A. Several groups are read twice."""
        first = updates[0].tensors
        mixed = [[name for name in names if first[name].is_floating_point()] for names in groups]
        G_SS = torch.zeros(len(updates), len(updates), dtype=torch.float64)
        for names in mixed:
            X_SD = stack(updates, names)
            G_SS += gram(X_SD, self.exact, self.from_first)
        A_SS = self._weights(G_SS, updates)
        for names, group in zip(mixed, groups, strict=True):
            if len(groups) > 1:
                X_SD = stack(updates, names)
            mix_(X_SD, A_SS)
            _put(X_SD, names, first, writers)
            for name in group:
                if name not in names:
                    for writer, row_S in zip(writers, A_SS.tolist(), strict=True):
                        writer.put(name, weighted_mean(name, updates, row_S))
        return A_SS


def _put(X_SD: torch.Tensor, names: Sequence[str], like: Mapping[str, torch.Tensor], writers: Sequence[Writer]) -> None:
    """Each client's row as the tensors that `stack` made it of."""
    templates = [like[name] for name in names]
    for row_D, writer in zip(X_SD, writers, strict=True):
        pieces = torch.split(row_D, [template.numel() for template in templates])
        for name, piece, template in zip(names, pieces, templates, strict=True):
            writer.put(name, piece.view(template.shape).to(template.dtype))
