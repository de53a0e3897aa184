"""One value per client, mixed on the server out of the cohort's values: what MCSA, HeurFedAMP and FedAMP have in common.

Shapes: S clients of the cohort, D numbers of a group of tensors, N of one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack

import torch

from attune.common.wire.tensors import Manifest, manifest_of
from attune.fedserver.lab.aggregators.base import Tensors, Update, Vault, cohort, write
from attune.fedserver.lab.aggregators.gram import gram, mix_, stack
from attune.fedserver.lab.aggregators.matrices import Matrices
from attune.fedserver.lab.aggregators.mean import weighted_mean

COLD_START, CLIENT = "cold-start", "client/"
Put = Callable[[str, Sequence[torch.Tensor]], None]  # a tensor's name, and its value for every client of the cohort


class Mixing:
    """w_i = sum_k A[i,k] x_k for every unit, A made by the subclass from the unit's inner products.

    A unit is a list of groups of tensors: it has one A, and a group is what is in memory at a time, for the whole cohort.
    State is stored by client name, so a client outside the cohort keeps its value. A client without a value is served the mean
    of all values (Theta_0 before the first round). That mean is a value of its own, and a round moves it by what it changes:
    mean += sum_i (w_i - what i was served before) / N. So a round reads only the cohort's old values.
    """

    exact = False  # whether large inner products are in float64 too
    from_first = False  # whether the inner products are of the differences from the cohort's first client

    def __init__(self, vault: Vault, units: Mapping[str, Sequence[list[str]]]) -> None:
        self._vault = vault
        self._units = dict(units)
        self._manifest: Manifest | None = None
        self._served = {key for key in vault.keys() if key.startswith(CLIENT)}  # noqa: SIM118 (a vault is not a mapping)

    def _weights(self, G_SS: torch.Tensor, updates: Sequence[Update]) -> torch.Tensor:
        """A, (S, S) in float64 with rows that sum to one, from a unit's inner products (S, S)."""
        raise NotImplementedError

    def start(self, initial: Mapping[str, torch.Tensor]) -> None:
        write(self._vault, COLD_START, initial)

    def admit(self, client: str) -> None:
        """Nothing to store: until its first round is closed, a client is served the value of a cold start."""

    def slot(self, client: str) -> str:
        key = f"{CLIENT}{client}"
        return key if key in self._served else COLD_START

    def cold_start(self) -> str:
        return COLD_START

    def generate(self, clients: Sequence[str]) -> Iterator[tuple[str, Tensors]]:
        """Nobody: every client has a slot."""
        return iter(())

    def close_round(self, updates: Sequence[Update]) -> dict[str, float]:
        """Mixed values of the cohort, and what they were mixed with, into the vault.

        Metric: each unit's mean weight of a client on itself.
        """
        counted = cohort(updates)
        if not counted:
            return {}
        keys = [f"{CLIENT}{update.client}" for update in counted]
        before = [self._vault.read(self.slot(update.client)) for update in counted]
        mean = self._vault.read(COLD_START)
        if self._manifest is None:
            self._manifest = manifest_of(mean)
        known = len(self._served.union(keys))
        metrics, matrices = {}, Matrices([update.client for update in counted], len(self._units))
        with ExitStack() as opened:
            writers = [opened.enter_context(self._vault.writer(key, self._manifest)) for key in keys]
            cold_start = opened.enter_context(self._vault.writer(COLD_START, self._manifest))

            def put(name: str, values: Sequence[torch.Tensor]) -> None:
                for writer, value in zip(writers, values, strict=True):
                    writer.put(name, value)
                cold_start.put(name, moved(mean[name], values, (old[name] for old in before), known))

            for unit, groups in self._units.items():
                A_SS = self._mix(counted, groups, put)
                matrices.add(unit, A_SS)
                metrics[f"self_attention/{unit}"] = float(A_SS.diagonal().mean())
        matrices.write(self._vault)
        self._served.update(keys)
        return metrics

    def fit(self, updates: Sequence[Update]) -> dict[str, float]:
        """As any round: it moves only the values of its cohort, and the value of a cold start."""
        return self.close_round(updates)

    def _mix(self, updates: Sequence[Update], groups: Sequence[list[str]], put: Put) -> torch.Tensor:
        """One unit of the whole cohort, read, mixed and put; its A. Several groups are read twice."""
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
            pieces_SN = torch.split(X_SD, [first[name].numel() for name in names], dim=1)
            for name, piece_SN in zip(names, pieces_SN, strict=True):
                put(name, [row_N.view(first[name].shape).to(first[name].dtype) for row_N in piece_SN])
            for name in group:
                if name not in names:
                    put(name, [weighted_mean(name, updates, row_S) for row_S in A_SS.tolist()])
        return A_SS


def moved(mean: torch.Tensor, new: Sequence[torch.Tensor], old: Iterable[torch.Tensor], count: int) -> torch.Tensor:
    """The mean of `count` values after some of them went from `old` to `new`; a value that was not counted was at the mean.

    Computed in at least float32 (integers: float64, rounded), in the tensor's own dtype.
    """
    exact = mean.is_floating_point()
    dtype = torch.promote_types(mean.dtype, torch.float32) if exact else torch.float64
    shift = torch.zeros(mean.shape, dtype=dtype)
    for after, before in zip(new, old, strict=True):
        shift.add_(after.to(dtype)).sub_(before.to(dtype))
    result = mean.to(dtype) + shift / count
    return result.to(mean.dtype) if exact else result.round_().to(mean.dtype)
