"""MCSA: one value per client, mixed component by component by how alike the clients are (FedMCSA).

Shapes: S clients of the cohort, D numbers of a component, B columns of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Literal

import torch

from common.aggregators.base import Tensors, Update, Vault, Writer, cohort, write
from common.aggregators.mean import shares_of, weighted_mean
from common.aggregators.settings import AttentionSettings
from common.wire.tensors import Manifest, manifest_of

INITIAL = "initial"
BLOCK = 65_536


class Attention:
    """w_i = sum_k A[i,k] x_k with A[i,:] = softmax_k(sigma * cos(x_i, x_k)), for every component (FedMCSA eq. 7, errata E1).

    State is kept by client name, so a client that is not in the cohort keeps its value. Memory: one component of the cohort.
    """

    returns: Literal["values", "change"] = "values"

    def __init__(self, settings: AttentionSettings, vault: Vault, seed: int, components: Mapping[str, list[str]]) -> None:
        self._settings = settings
        self._vault = vault
        self._components = dict(components)
        if settings.components == "tensor":
            self._components = {name: [name] for names in components.values() for name in names}
        self._manifest: Manifest | None = None
        self._served = {key for key in vault.keys() if key != INITIAL}  # noqa: SIM118 (a vault is not a mapping)

    def __repr__(self) -> str:
        return f"Attention(sigma={self._settings.sigma}, components={len(self._components)}, clients={len(self._served)})"

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
        """Attended values of the cohort into the vault. Metric: each component's mean weight of a client on itself."""
        counted = cohort(updates)
        if not counted:
            return {}
        shares_S = None if self._settings.weighting == "none" else torch.tensor(shares_of(counted, False), dtype=torch.float64)
        keys = [f"client/{update.client}" for update in counted]
        if self._manifest is None:
            self._manifest = manifest_of(self._vault.read(INITIAL))
        metrics = {}
        with ExitStack() as stack:
            writers = [stack.enter_context(self._vault.writer(key, self._manifest)) for key in keys]
            for component, names in self._components.items():
                A_SS = self._attend(counted, names, shares_S, writers)
                metrics[f"self_attention/{component}"] = float(A_SS.diagonal().mean())
        self._served.update(keys)
        return metrics

    def _attend(
        self, updates: Sequence[Update], names: list[str], shares_S: torch.Tensor | None, writers: Sequence[Writer]
    ) -> torch.Tensor:
        """One component of the whole cohort, read, mixed and written; its attention."""
        first = {name: updates[0].tensors[name] for name in names}
        mixed = [name for name in names if first[name].is_floating_point()]
        X_SD = _stack(updates, mixed, first)
        A_SS = attention(gram(X_SD), self._settings.sigma, shares_S)
        mix_(X_SD, A_SS)
        for i, writer in enumerate(writers):
            pieces = torch.split(X_SD[i], [first[name].numel() for name in mixed])
            for name, piece in zip(mixed, pieces, strict=True):
                writer.put(name, piece.view(first[name].shape).to(first[name].dtype))
        for name in names:
            if name not in mixed:
                for writer, row_S in zip(writers, A_SS.tolist(), strict=True):
                    writer.put(name, weighted_mean(name, updates, row_S))
        return A_SS


def _stack(updates: Sequence[Update], names: list[str], first: Tensors) -> torch.Tensor:
    """The component's floating-point tensors of every client, flattened and concatenated: (S, D), at least float32."""
    dtype = torch.float32
    for name in names:
        dtype = torch.promote_types(dtype, first[name].dtype)
    X_SD = torch.empty(len(updates), sum(first[name].numel() for name in names), dtype=dtype)
    for row_D, update in zip(X_SD, updates, strict=True):
        offset = 0
        for name in names:
            tensor = update.tensors[name]
            row_D[offset : offset + tensor.numel()].copy_(tensor.reshape(-1))
            offset += tensor.numel()
    return X_SD


def gram(X_SD: torch.Tensor) -> torch.Tensor:
    """All inner products, (S, S) in float64 by blocks of columns.

    Float64 because sigma multiplies every error of a cosine.
    """
    S = X_SD.shape[0]
    G_SS = torch.zeros(S, S, dtype=torch.float64)
    for X_SB in torch.split(X_SD, BLOCK, dim=1):
        block_SB = X_SB.double()
        G_SS.addmm_(block_SB, block_SB.T)
    return G_SS


def attention(G_SS: torch.Tensor, sigma: float, shares_S: torch.Tensor | None = None) -> torch.Tensor:
    """Softmax over k of sigma * cos(x_i, x_k) from inner products: (S, S) float64, every row sums to one.

    The cosine with a zero vector is 0. With `shares_S` each weight is multiplied by client k's data share and the row
    normalised again (the published code's form, errata E4).
    """
    norm_S = G_SS.diagonal().sqrt()
    inverse_S = torch.where(norm_S > 0, 1 / norm_S, 0.0)
    cosine_SS = (G_SS * inverse_S[:, None] * inverse_S).clamp(-1, 1)
    logits_SS = sigma * cosine_SS
    if shares_S is not None:
        logits_SS = logits_SS + shares_S.log()
    return logits_SS.softmax(dim=1)


def mix_(X_SD: torch.Tensor, A_SS: torch.Tensor) -> None:
    """X <- A X in place, block of columns by block."""
    A_SS = A_SS.to(X_SD.dtype)
    for X_SB in torch.split(X_SD, BLOCK, dim=1):
        X_SB.copy_(A_SS @ X_SB)
