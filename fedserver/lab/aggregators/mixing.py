"""One value per client, mixed on the server out of the cohort's values (what MCSA, HeurFedAMP and FedAMP do), or left as it is.

Shapes: S clients of the cohort, D numbers of a group of tensors, N of one tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from typing import Any

import torch

from attune.common.exchange.transform import PartUpdate
from attune.common.methods.settings.aggregators import MixedSettings
from attune.common.wire.header import layout_of
from attune.common.wire.tensors import DTYPES
from attune.fedserver.lab import accelerator
from attune.fedserver.lab.aggregators.base import MadeOfSettings, Tensors, Vault, cohort, manifest_in, read_into, write
from attune.fedserver.lab.aggregators.mean import weighted_mean
from attune.fedserver.lab.aggregators.stored import CLIENTS, MATRICES, MEAN, UNIT
from attune.fedserver.lab.aggregators.votes import discounted, gram, limited, mix_, stack

COLD_START, CLIENT = "cold-start", "client/"
Put = Callable[[str, Sequence[torch.Tensor]], None]  # takes a tensor's name, and its next value for each client of the cohort


class Mixing(MadeOfSettings):
    """w_i = sum_k A[i,k] x_k for every unit, A made by the subclass from the unit's inner products.

    A unit is a list of groups of tensors: it has one A, and a group is what is in memory at a time, for the whole cohort.
    State is stored by client name, so a client outside the cohort keeps its value. A client without a value is served the mean
    of all values (Theta_0 before the first round). That mean is a value of its own, and a round moves it by what it changes:
    mean += sum_i (w_i - what i was served before) / N. So a round reads only the cohort's old values.
    """

    from_first = False  # whether the inner products are of the differences from the cohort's first client

    _settings: MixedSettings

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._units = self._groups(self._components)
        self._device = accelerator.used()
        self._served = {key for key in self._vault.keys() if key.startswith(CLIENT)}  # noqa: SIM118 (a vault is not a mapping)

    @property
    def exact(self) -> bool:
        """True if large inner products are in float64 too."""
        return False

    def _groups(self, components: Mapping[str, list[str]]) -> dict[str, list[list[str]]]:
        """Return the units, each with its groups of tensors: here the part is one unit, with a group for each component."""
        return {"model": list(components.values())}

    def _weights(self, G_SS: torch.Tensor, updates: Sequence[PartUpdate]) -> torch.Tensor:
        """Return A, (S, S) float64 with rows that sum to one, from a unit's inner products (S, S)."""
        raise NotImplementedError

    def start(self, initial: Mapping[str, torch.Tensor]) -> None:
        write(self._vault, COLD_START, initial)

    def admit(self, client: str, founder: bool = False) -> None:
        """Store no value: until its first round is closed, a client is served the cold start."""

    def slot(self, client: str) -> str:
        key = self._key(client)
        return key if key in self._served else COLD_START

    def cold_start(self) -> str:
        return COLD_START

    def generate(self, clients: Sequence[str]) -> Iterator[tuple[str, Tensors]]:
        """Yield no tensors, because every client has a slot."""
        return iter(())

    def close_round(self, updates: Sequence[PartUpdate]) -> dict[str, float]:
        """Write mixed values of the cohort, and the weights, into the vault.

        The metric is each unit's mean weight of a client on itself.
        """
        counted = cohort(updates)
        if not counted:
            return {}
        clients = [update.client for update in counted]
        keys, slots = [self._key(client) for client in clients], [self.slot(client) for client in clients]
        metrics, matrices, known = {}, Matrices(clients, len(self._units)), len(self._served.union(keys))
        before = {key: self._vault.read(key) for key in (COLD_START, *slots)}
        with ExitStack() as opened:
            manifest = manifest_in(before[COLD_START])
            writers = {key: opened.enter_context(self._vault.writer(key, manifest)) for key in (*keys, COLD_START)}

            def put(name: str, values: Sequence[torch.Tensor]) -> None:
                """Write a tensor of each client, and its mean over all clients."""
                for key, value in zip(keys, values, strict=True):
                    writers[key].put(name, value)
                old = _one_after_the_other((before[slot] for slot in slots), name, values[0])
                writers[COLD_START].put(name, moved(before[COLD_START][name], values, old, known))

            for unit, groups in self._units.items():
                A_SS = self._mix(groups, counted, put)
                matrices.add(unit, A_SS)
                metrics[f"self_attention/{unit}"] = float(A_SS.diagonal().mean())
        matrices.write(self._vault)
        self._served.update(keys)
        return metrics

    def _mix(self, groups: Sequence[Sequence[str]], updates: Sequence[PartUpdate], put: Put) -> torch.Tensor:
        """Mix a unit, hand each tensor's values to `put`, and return A. The numbers of one group are in memory at a time."""
        G_SS = torch.zeros(len(updates), len(updates), dtype=torch.float64)
        held: torch.Tensor | None = None
        for names in groups:
            products_SS, held = self._products(names, updates, keep=len(groups) == 1)
            G_SS += products_SS
        A_SS = self._limited(G_SS, updates)
        for names in groups:
            self._mix_group(names, A_SS, updates, held, put)
        return A_SS

    def _products(
        self, names: Sequence[str], updates: Sequence[PartUpdate], keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the inner products of a group, (S, S) float64; with `keep` its numbers too, so that they are read once."""
        X_SD = self._numbers(names, updates)
        return gram(X_SD, self.exact, self.from_first).cpu(), X_SD if keep else None

    def _numbers(self, names: Sequence[str], updates: Sequence[PartUpdate]) -> torch.Tensor:
        return stack(updates, _floating(names, updates)).to(self._device)

    def _limited(self, G_SS: torch.Tensor, updates: Sequence[PartUpdate]) -> torch.Tensor:
        """Return A of a unit, from its inner products."""
        A_SS = self._weights(G_SS, updates)
        if any(update.fresh != 1 for update in updates):
            A_SS = discounted(A_SS, torch.tensor([update.fresh for update in updates], dtype=torch.float64))
        cap, floor = self._settings.attention_cap, self._settings.self_floor
        return limited(A_SS, cap, floor) if cap < 1 or floor > 0 else A_SS

    def _mix_group(
        self, group: Sequence[str], A_SS: torch.Tensor, updates: Sequence[PartUpdate], held: torch.Tensor | None, put: Put
    ) -> None:
        """Hand each tensor's name and its mixed values to `put`. `held` has the group's numbers, and is overwritten."""
        first, names = manifest_in(updates[0].tensors), _floating(group, updates)
        X_SD = self._numbers(group, updates) if held is None else held
        mix_(X_SD, A_SS)
        pieces_SN = torch.split(X_SD, [math.prod(first[name].shape) for name in names], dim=1)
        for name, piece_SN in zip(names, pieces_SN, strict=True):
            put(name, [row_N.view(first[name].shape).to(DTYPES[first[name].dtype]).cpu() for row_N in piece_SN])
        for name in group:
            if name not in names:
                put(name, [weighted_mean(name, updates, row_S) for row_S in A_SS.tolist()])

    def fit(self, updates: Sequence[PartUpdate]) -> dict[str, float]:
        """Close a round as usual: it moves only the values of its cohort, and the cold start."""
        return self.close_round(updates)

    def _key(self, client: str) -> str:
        return f"{CLIENT}{client}"


class HandedIn(Mixing):
    """w_i = x_i: each client's value stays as it was handed in, and the cold start as it is."""

    def close_round(self, updates: Sequence[PartUpdate]) -> dict[str, float]:
        """Write the value of each client into the vault."""
        values = {self._key(update.client): update.tensors for update in cohort(updates)}
        manifest = manifest_in(self._vault.read(COLD_START))
        with ExitStack() as opened:
            writers = {key: opened.enter_context(self._vault.writer(key, manifest)) for key in values}
            for key, name in product(values, layout_of(manifest).manifest):
                writers[key].put(name, values[key][name])
        self._served.update(values)
        return {}


def _floating(group: Sequence[str], updates: Sequence[PartUpdate]) -> list[str]:
    """Return the tensors of a group that are mixed by products; integers take weighted means."""
    first = manifest_in(updates[0].tensors)
    return [name for name in group if DTYPES[first[name].dtype].is_floating_point]


def _one_after_the_other(
    sources: Iterable[Mapping[str, torch.Tensor]], name: str, like: torch.Tensor
) -> Iterator[torch.Tensor]:
    """Yield one tensor of each client, in the same memory: the next overwrites the one before."""
    tensor = torch.empty_like(like, memory_format=torch.contiguous_format)
    for tensors in sources:
        read_into(tensors, name, tensor.view(-1))
        yield tensor


def moved(mean: torch.Tensor, new: Sequence[torch.Tensor], old: Iterable[torch.Tensor], count: int) -> torch.Tensor:
    """Return the mean of `count` values after some of them changed from `old` to `new`. A new value was at the mean before.

    It is computed in at least float32 (integers: float64, rounded), in the tensor's own dtype.
    """
    exact = mean.is_floating_point()
    dtype = torch.promote_types(mean.dtype, torch.float32) if exact else torch.float64
    shift = torch.zeros(mean.shape, dtype=dtype)
    for after, before in zip(new, old, strict=True):
        shift.add_(after.to(dtype)).sub_(before.to(dtype))
    result = shift.div_(count).add_(mean.to(dtype))
    return result.to(mean.dtype) if exact else result.round_().to(mean.dtype)


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
