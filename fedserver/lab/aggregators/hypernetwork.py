"""FedTP's hypernetwork: generates a part of every client's model from an embedding of the client, and learns from changes.

Shapes: S clients of the cohort, E numbers of an embedding, H hidden units, R generated weights of one head, B rows of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from attune.common.exchange.transform import PartUpdate
from attune.common.methods.hypernetwork import (
    FORWARD_ROWS,
    Head,
    Optimiser,
    computes_in,
    features,
    generated,
    heads_of,
    initialise,
    optimiser_of,
)
from attune.common.methods.settings.aggregators import HypernetworkSettings
from attune.common.seeds import derive
from attune.common.wire.files import TensorFile
from attune.fedserver.lab import accelerator
from attune.fedserver.lab.aggregators.base import MadeOfSettings, Tensors, cohort, write
from attune.fedserver.lab.aggregators.described import FEWEST_DESCRIBED, DescriptionRegression, evenly, fitted
from attune.fedserver.lab.aggregators.mean import shares_of
from attune.fedserver.lab.aggregators.mixing import names_to_tensor
from attune.fedserver.lab.aggregators.stored import DESCRIBED, DESCRIPTION, EMBEDDED, NETWORK, STEPS, names_in


class Embeddings:
    """Embeddings z_i by client name. A step changes only the clients of the cohort: others get no momentum and no decay."""

    def __init__(self, seed: int, dim: int, dtype: torch.dtype, moments: Sequence[str]) -> None:
        self._seed, self._dim, self._dtype = seed, dim, dtype
        self._kinds = ("value", *moments)
        self._rows: dict[str, list[torch.Tensor]] = {}  # client -> its value, then its moments, each (E)
        self._steps: dict[str, int] = {}
        self._descriptions: dict[str, torch.Tensor] = {}  # client -> what it says of its data, (M) float64

    def __contains__(self, client: str) -> bool:
        return client in self._rows

    def admit(self, client: str, late_E: torch.Tensor | None) -> None:
        """Give a client its first embedding, unless it has a trained one.

        It depends on the client's name and on what has been trained, so a restart gives the same.

        Args:
            client: The client.
            late_E: The first embedding of a client that enrolled after the first round was closed. None: a draw from N(0, 1).
                Founders have draws, because the network could not tell them apart if they began at one place.
        """
        if self.is_trained(client):
            return
        value_E = self._drawn(client) if late_E is None else late_E.clone()
        self._rows[client] = [value_E, *(torch.zeros_like(value_E) for _ in self._kinds[1:])]
        self._steps[client] = 0

    def _drawn(self, client: str) -> torch.Tensor:
        draw = torch.Generator().manual_seed(derive(self._seed, "embedding", client))
        return torch.randn(self._dim, generator=draw, dtype=torch.float64).to(self._dtype)

    def is_trained(self, client: str) -> bool:
        """Return whether the client's embedding has taken a step."""
        return bool(self._steps.get(client))

    def trained(self) -> list[str]:
        """Return the clients with a trained embedding."""
        return [name for name in sorted(self._rows) if self._steps[name]]

    def describe(self, client: str, description_M: torch.Tensor) -> None:
        """Note what a client says of its data."""
        self._descriptions[client] = description_M

    def description(self, client: str) -> torch.Tensor | None:
        """Return what a client says of its data, (M); None if it says nothing, or its embedding is trained."""
        return None if self.is_trained(client) else self._descriptions.get(client)

    def described(self) -> list[str]:
        """Return the clients with a trained embedding and a description."""
        return [name for name in self.trained() if name in self._descriptions]

    def descriptions(self, clients: Sequence[str]) -> torch.Tensor:
        """Return the descriptions (S, M) of clients that have one."""
        return torch.stack([self._descriptions[client] for client in clients])

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
        """Return everything to save: the names as JSON in bytes, then (N, E) of each kind, and the N step counters.

        Descriptions (K, M) of K clients follow where there are any.
        """
        names = sorted(self._rows)
        result = {EMBEDDED: names_to_tensor(names)}
        for k, kind in enumerate(self._kinds):
            rows = [self._rows[name][k] for name in names]
            result[f"embedding.{kind}"] = torch.stack(rows) if rows else torch.empty(0, self._dim, dtype=self._dtype)
        result[STEPS] = torch.tensor([self._steps[name] for name in names], dtype=torch.int64)
        if telling := sorted(self._descriptions.keys() & self._rows.keys()):
            result |= {DESCRIBED: names_to_tensor(telling), DESCRIPTION: self.descriptions(telling)}
        return result

    def load(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Load what `tensors` returned."""
        names = names_in(saved[EMBEDDED].numpy())
        kinds_NE = [saved[f"embedding.{kind}"] for kind in self._kinds]
        self._rows = {name: [kind_NE[i].clone() for kind_NE in kinds_NE] for i, name in enumerate(names)}
        self._steps = dict(zip(names, saved[STEPS].tolist(), strict=True))
        if DESCRIBED in saved:
            telling = names_in(saved[DESCRIBED].numpy())
            self._descriptions = dict(zip(telling, saved[DESCRIPTION].clone(), strict=True))


INITIAL = "initial"
HEAD = "head."  # what the names of the heads' own tensors begin with
BLOCK_ROWS = 2_048  # rows of a head that are used and stepped at a time: they stay in the cache


@dataclass
class HypernetworkState:
    """State in memory while the server runs. The vault has all of it except the layout."""

    initial: Tensors
    heads: list[Head]
    network: Tensors
    moments: dict[str, Tensors]  # kind -> by parameter
    embeddings: Embeddings
    step: int = 0


@dataclass
class _HeadRound:
    """Sums that a round has gathered from the heads so far."""

    F_SH: torch.Tensor  # the features, which are the input of every head
    slope: torch.Tensor  # dF, (S, H): the gradient where the heads begin
    square: torch.Tensor  # of the mean change, float64


class Hypernetwork(MadeOfSettings):
    """W_i = h(phi; z_i); phi and z descend on sum_i (m_i / M) <W_i, -Delta_i> (FedTP eq. 7-10, signs as in errata E2).

    Memory: weights, the optimiser's moments and one block of rows. The vault's "network" holds weights, moments,
    embeddings and step counters, so that a restart continues bit for bit; "initial" the shapes that are generated.
    """

    _settings: HypernetworkSettings

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        settings = self._settings
        self._optimiser = optimiser_of(settings)
        self._embedder = optimiser_of(msgspec.structs.replace(settings, server_lr=settings.z_lr))
        self._fitter = optimiser_of(msgspec.structs.replace(settings, server_lr=settings.fit_lr))
        self._device = accelerator.used()
        self._state: HypernetworkState | None = None
        # Of the present state, once a late client needed it:
        self._regression: DescriptionRegression | None = None
        self._typical_E: torch.Tensor | None = None

    def start(self, initial: Mapping[str, torch.Tensor]) -> None:
        """Write fresh weights for the given tensors, drawn from the seed."""
        self._state = state = self._blank({name: tensor.detach().clone() for name, tensor in initial.items()})
        seed = derive(self._seed, "hypernetwork")
        drawn = initialise(self._settings, state.heads, state.initial, computes_in(state.initial), seed)
        state.network = {name: self._placed(name, tensor) for name, tensor in drawn.items()}
        write(self._vault, INITIAL, state.initial)
        self._save(state)

    def admit(self, client: str, founder: bool = False) -> None:
        embeddings = self._load().embeddings
        late = not founder and not embeddings.is_trained(client)
        embeddings.admit(client, self._late(embeddings.description(client)) if late else None)

    def describe(self, client: str, description: Sequence[float]) -> None:
        """Note what a client says of its data, for its first embedding and those of later clients."""
        self._load().embeddings.describe(client, torch.tensor(description, dtype=torch.float64))
        self._forget_late()

    @torch.no_grad()
    def _late(self, description_M: torch.Tensor | None = None) -> torch.Tensor | None:
        """Return the first embedding (E) of a late client; None while none is trained.

        Its weights are near the mean of the trained clients' weights: of all clients alike, or, if enough of them have a
        description, by how near theirs are to this one. Heads are linear, so the mean of their inputs, the features, is wanted.
        The weights of the mean embedding would be worse, because clients with unlike embeddings may have like weights.
        """
        state = self._load()
        if not (trained := evenly(state.embeddings.trained())):
            return None
        if description_M is not None and len(known := evenly(state.embeddings.described())) >= FEWEST_DESCRIBED:
            if self._regression is None:
                values = state.embeddings.descriptions(known), state.embeddings.values(known)
                self._regression = DescriptionRegression(*values, lambda z_NE: features(state.network, z_NE))
            return self._regression.embedding(description_M)
        if self._typical_E is None:
            z_NE = state.embeddings.values(trained)
            wanted_H = features(state.network, z_NE).mean(dim=0)
            self._typical_E = fitted(lambda z_SE: features(state.network, z_SE), z_NE.mean(dim=0), wanted_H)
        return self._typical_E

    def _forget_late(self) -> None:
        """Forget what late clients begin with, because the state changes."""
        self._regression = self._typical_E = None

    def slot(self, client: str) -> str | None:
        """Return None, because weights are generated."""
        return None

    @torch.no_grad()
    def generate(self, clients: Sequence[str]) -> Iterator[tuple[str, Tensors]]:
        """Yield W_i of each client, FORWARD_ROWS of them per forward pass. An unknown client is admitted as a late one."""
        state = self._load()
        self._admit_others(clients)
        for start in range(0, len(clients), FORWARD_ROWS):
            asked = clients[start : start + FORWARD_ROWS]
            yield from zip(asked, self._generated(state, state.embeddings.values(asked)), strict=True)

    @torch.no_grad()
    def cold_start(self) -> Tensors:
        """Return W of the embedding with which a late client begins; while none is trained, of zero, the mean of the draws."""
        state, late_E = self._load(), self._late()
        z_E = torch.zeros(self._settings.embedding_dim, dtype=computes_in(state.initial)) if late_E is None else late_E
        return next(iter(self._generated(state, z_E[None])))

    @torch.no_grad()
    def close_round(self, updates: Sequence[PartUpdate]) -> dict[str, float]:
        """Take one backward pass for the cohort, and one step of phi and of its z. The metric is the norm of the mean delta."""
        return self._close(updates, phi=True)

    @torch.no_grad()
    def fit(self, updates: Sequence[PartUpdate]) -> dict[str, float]:
        """Take one step of the cohort's z; phi and all other z keep every bit. The metric is that of `close_round`."""
        return self._close(updates, phi=False)

    def _close(self, updates: Sequence[PartUpdate], phi: bool) -> dict[str, float]:
        counted = cohort(updates)
        if not counted:
            return {}
        try:
            metrics = self._descend(counted, phi)
            self._save(self._load())
        except BaseException:
            self._state = None  # steps change it in place, so the next use must read the vault again
            raise
        return metrics

    def _descend(self, updates: Sequence[PartUpdate], phi: bool) -> dict[str, float]:
        """Take a step of the cohort's z and, with `phi`, of the network's weights."""
        state = self._load()
        clients = [update.client for update in updates]
        self._admit_others(clients)
        self._forget_late()
        if phi:
            self._begin_moments(state)
            state.step += 1
        mlp = {name: p.detach().requires_grad_() for name, p in state.network.items() if name.startswith("mlp.")}
        z_SE = state.embeddings.values(clients).requires_grad_()
        with torch.enable_grad():
            F_SH = features(mlp, z_SE)
        # `new_zeros` has C order, unlike F_SH: sums into it are then seven times as fast.
        placed_SH = F_SH.detach().to(self._device)
        nothing = torch.zeros((), dtype=torch.float64, device=self._device)
        gathered = _HeadRound(placed_SH, placed_SH.new_zeros(F_SH.shape), nothing)
        self._descend_heads(updates, gathered, phi)
        dz_SE, *gradients = torch.autograd.grad(F_SH, [z_SE, *mlp.values()], gathered.slope.cpu())
        for name, gradient in zip(mlp, gradients, strict=True) if phi else ():
            self._optimiser.dense_(state.network[name], gradient, self._moments(state, name), state.step)
        if self._settings.embeddings == "trained":
            state.embeddings.step(clients, dz_SE, self._embedder if phi else self._fitter)
        return {"mean_change_norm": float(gathered.square) ** 0.5}

    def _descend_heads(self, updates: Sequence[PartUpdate], gathered: _HeadRound, phi: bool) -> None:
        """Add what the heads contribute to the round and, with `phi`, step them.

        A block's weights and moments are used for dF and stepped while they are in the cache, so that a step reads and writes
        each of them once.
        """
        state = self._load()
        for head in state.heads:
            size = sum(head.sizes)
            for start in range(0, max(1, size), BLOCK_ROWS):
                rows = slice(start, min(start + BLOCK_ROWS, size))
                G_SB = self._gradient(state, head, rows, updates).to(self._device)
                gathered.square += G_SB.sum(dim=0).double().square().sum()
                gathered.slope.addmm_(G_SB, _within(state.network[head.weight], rows))
                if phi:
                    self._step_head(state, head, rows, G_SB, gathered.F_SH)

    def _gradient(self, state: HypernetworkState, head: Head, rows: slice, updates: Sequence[PartUpdate]) -> torch.Tensor:
        """Return -(m_i / M) Delta_i of these rows, (S, B): the gradient of sum_i (m_i / M) f_i in W_i, or as printed +."""
        sign = -1 if self._settings.delta_sign == "corrected" else 1
        G_SB = torch.empty(len(updates), rows.stop - rows.start, dtype=state.network[head.weight].dtype)
        for row_B, update, share in zip(G_SB, updates, shares_of(updates, uniform=False), strict=True):
            for name, piece, first in head.within(rows.start, rows.stop, row_B):
                piece.copy_(_span(update.tensors, name, first, first + piece.numel())).mul_(sign * share)
        return G_SB

    def _step_head(self, state: HypernetworkState, head: Head, rows: slice, G_SB: torch.Tensor, F_SH: torch.Tensor) -> None:
        """Step these rows of a head and of its bias in place."""
        weight, bias = ([_within(moment, rows) for moment in self._moments(state, name)] for name in (head.weight, head.bias))
        self._optimiser.outer_(_within(state.network[head.weight], rows), G_SB, F_SH, weight, state.step)
        self._optimiser.dense_(_within(state.network[head.bias], rows), G_SB.sum(dim=0), bias, state.step)

    def _admit_others(self, clients: Sequence[str]) -> None:
        for client in clients:
            if client not in self._load().embeddings:
                self.admit(client)

    def _begin_moments(self, state: HypernetworkState) -> None:
        for kind in self._optimiser.moments:
            if kind not in state.moments:
                state.moments[kind] = {name: torch.zeros_like(tensor) for name, tensor in state.network.items()}

    def _generated(self, state: HypernetworkState, z_SE: torch.Tensor) -> list[Tensors]:
        return generated(state.network, state.heads, state.initial, z_SE)

    def _moments(self, state: HypernetworkState, name: str) -> list[torch.Tensor]:
        return [state.moments[kind][name] for kind in self._optimiser.moments]

    def _blank(self, initial: Tensors) -> HypernetworkState:
        embeddings = Embeddings(self._seed, self._settings.embedding_dim, computes_in(initial), self._optimiser.moments)
        return HypernetworkState(initial, heads_of(initial, self._components), {}, {}, embeddings)

    def _placed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on its processor.

        Heads, nearly all of the state, lie where they are multiplied. The rest is on the CPU.
        """
        return tensor.to(self._device) if name.startswith(HEAD) else tensor

    def _save(self, state: HypernetworkState) -> None:
        tensors = {name: tensor.cpu() for name, tensor in state.network.items()}
        for kind, moments in state.moments.items():
            tensors.update({f"{kind}/{name}": moment.cpu() for name, moment in moments.items()})
        tensors["step"] = torch.tensor(state.step, dtype=torch.int64)
        write(self._vault, NETWORK, tensors | state.embeddings.tensors())

    def _load(self) -> HypernetworkState:
        """Return the state in memory, or that of the vault.

        Raises:
            KeyError: The federation was never started.
        """
        if self._state is None:
            saved = self._vault.read(NETWORK)
            state = self._blank({name: tensor.clone() for name, tensor in self._vault.read(INITIAL).items()})
            for name in saved:
                kind, _, parameter = name.partition("/")
                if name.startswith(("mlp.", HEAD)):
                    state.network[name] = self._placed(name, saved[name].clone())
                elif kind in self._optimiser.moments:
                    state.moments.setdefault(kind, {})[parameter] = self._placed(parameter, saved[name].clone())
            state.step = int(saved["step"])
            state.embeddings.load(saved)
            self._state = state
        return self._state


def _within(tensor: torch.Tensor, rows: slice) -> torch.Tensor:
    """Return the view of these rows, by `narrow`: fake GPU tensors take no index on a machine without a GPU."""
    return tensor.narrow(0, rows.start, rows.stop - rows.start)


def _span(tensors: Mapping[str, torch.Tensor], name: str, start: int, end: int) -> torch.Tensor:
    """Return some elements of a tensor in C order; only these are read if the tensors are in a file."""
    return tensors.span(name, start, end) if isinstance(tensors, TensorFile) else tensors[name].reshape(-1)[start:end]
