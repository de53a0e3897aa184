"""Interface of an aggregator, and of the vault that holds its state, with a vault in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Protocol

import torch

from attune.common.errors import UpdateRefused
from attune.common.exchange.transform import PartUpdate
from attune.common.wire.header import Manifest, layout_of
from attune.common.wire.tensors import DTYPES, TensorSource, manifest_of

Tensors = dict[str, torch.Tensor]


class Writer(Protocol):
    """Writer of one key: takes each tensor of its manifest once, in any order. A clean end of its `with` shows all at once."""

    def put(self, name: str, tensor: torch.Tensor) -> None: ...


class Vault(Protocol):
    """Named sets of tensors: the state of one part of a federation. A write is visible to `read` when its `with` ends."""

    def keys(self) -> Iterable[str]: ...

    def read(self, key: str) -> Mapping[str, torch.Tensor]:
        """Return the tensors under `key`; they may be loaded at each access.

        Raises:
            KeyError: There is no such key.
        """

    def writer(self, key: str, manifest: Manifest) -> AbstractContextManager[Writer]: ...


class Aggregator(Protocol):
    """One part's state on the server.

    The class is called with (settings, vault, seed, components, carrier): its settings struct; the vault in which the part's
    state lies; the federation's seed; for each component of the model the names of its tensors in this part; and what
    carries out the pieces of its rounds (`carrier.Carrier`), which an aggregator that is not `Blockwise` leaves unused.
    """

    def start(self, initial: Mapping[str, torch.Tensor]) -> None:
        """Write Theta_0 of this part into the vault; once, in a fresh federation."""

    def admit(self, client: str, founder: bool = False) -> None:
        """Add a client; this may be repeated. A founder enrolled before the first round was closed."""

    def slot(self, client: str) -> str | None:
        """Return the vault key of the tensors that this client is served; None if `generate` makes them."""

    def generate(self, clients: Sequence[str]) -> Iterator[tuple[str, Tensors]]:
        """Yield what these clients without a slot are served, in the given order."""

    def cold_start(self) -> str | Tensors:
        """Return what an unknown client is served: the vault key, or generated tensors.

        It follows from the state alone, and no client is admitted.
        """

    def close_round(self, updates: Sequence[PartUpdate]) -> dict[str, float]:
        """Add a cohort's updates, in any order, to the state, and return metrics. Without a counting update the state stays."""

    def fit(self, updates: Sequence[PartUpdate]) -> dict[str, float]:
        """Close a round of newcomers to a finished federation: only what these clients alone are served may move."""


@dataclass(frozen=True)
class Block:
    """A piece of a round's work: these tensors of every update."""

    unit: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Unit:
    """Blocks whose partials are combined; no other unit needs them.

    Attributes:
        name: Unique in the part.
        blocks: The pieces, in the order in which `combine` gets their partials.
        applied_here: Whether `apply` is done in the server, because it reads the vault or costs less than sending columns.
    """

    name: str
    blocks: tuple[Block, ...]
    applied_here: bool = False


Put = tuple[str, str, torch.Tensor]  # a vault key, a tensor's name, its next value


class Blockwise(Aggregator, Protocol):
    """An aggregator whose rounds can be carried out in pieces, by as many workers as there are blocks.

    For each unit in order: `partial` of its blocks, on any worker and in any order; `combine`, in the server, of the partials
    in the order of the blocks; then `apply` to each block, on any worker unless the unit is `applied_here`; then `completed`.
    `partial` reads the settings and the updates, never the vault. Of units that are not `applied_here` that holds for `apply`,
    too. A worker that reaches the blobs itself does all of it. Blocks never split a sum that is folded in floating point, so
    the bits do not depend on the workers. `updates` are those of `cohort`.

    Attributes:
        reported: Names among the combined values that the aggregator needs after the round.
    """

    reported: tuple[str, ...]

    def units(self) -> Sequence[Unit]: ...

    def kept(self, updates: Sequence[PartUpdate]) -> dict[str, Manifest]:
        """Return the vault keys that the round writes, with dtype and shape of their tensors."""

    def reads(self, updates: Sequence[PartUpdate]) -> Sequence[str]:
        """Return the vault keys that `apply` and `completed` read."""

    def partial(self, block: Block, updates: Sequence[PartUpdate]) -> Tensors:
        """Return what `combine` needs of a block."""

    def combine(self, unit: Unit, partials: Sequence[Tensors], updates: Sequence[PartUpdate]) -> Tensors:
        """Return what `apply` needs for each block of the unit."""

    def apply(self, block: Block, combined: Tensors, updates: Sequence[PartUpdate]) -> Iterator[Put]:
        """Yield the block's next values, one tensor after the other."""

    def completed(self, puts: Iterable[Put], updates: Sequence[PartUpdate]) -> Iterator[Put]:
        """Yield next values that `apply` has made, with those that follow from them and from the vault."""


def cohort(updates: Sequence[PartUpdate]) -> list[PartUpdate]:
    """Return updates in the order of names, without those of 0 samples. Sums are taken in this order, not in that of arrival.

    Raises:
        UpdateRefused: A client occurs twice.
    """
    ordered = sorted(updates, key=lambda update: update.client)
    for one, other in pairwise(ordered):
        if one.client == other.client:
            raise UpdateRefused(f"two updates of {one.client} in one cohort: hand in one of them")
    return [update for update in ordered if update.weight > 0]


def manifest_in(tensors: Mapping[str, torch.Tensor]) -> Manifest:
    """Return dtype and shape of each tensor; tensors of a file are not read."""
    return tensors.manifest if isinstance(tensors, TensorSource) else manifest_of(tensors)


def read_into(tensors: Mapping[str, torch.Tensor], name: str, out_N: torch.Tensor) -> None:
    """Read the numbers of a tensor in C order into `out_N`, in its dtype, without another copy if they are in a file."""
    if isinstance(tensors, TensorSource) and DTYPES[tensors.manifest[name].dtype] == out_N.dtype:
        tensors.read_into(name, out_N)
    else:
        out_N.copy_(tensors[name].reshape(-1))


def write(vault: Vault, key: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write all of `tensors` under `key` in the order of the file, so that it is hashed while it is written."""
    manifest = manifest_of(tensors)
    with vault.writer(key, manifest) as writer:
        for name in layout_of(manifest).manifest:
            writer.put(name, tensors[name])


class MemoryWriter:
    """The writer of MemoryVault: copies what it is given and checks it against the manifest."""

    def __init__(self, store: dict[str, Tensors], key: str, manifest: Manifest) -> None:
        self._store, self._key, self._manifest = store, key, manifest
        self._tensors: Tensors = {}

    def put(self, name: str, tensor: torch.Tensor) -> None:
        expected = self._manifest[name]
        actual = manifest_of({name: tensor})[name]
        if name in self._tensors or actual != expected:
            raise ValueError(f"{self._key}: {name} was put twice, or is {actual} where the manifest has {expected}")
        self._tensors[name] = tensor.detach().clone()

    def __enter__(self) -> MemoryWriter:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            return
        if missing := self._manifest.keys() - self._tensors.keys():
            raise ValueError(f"{self._key}: never put: {', '.join(sorted(missing))}")
        self._store[self._key] = {name: self._tensors[name] for name in self._manifest}


class MemoryVault:
    """A vault in memory, for tests and for simulations in one process."""

    def __init__(self) -> None:
        self._store: dict[str, Tensors] = {}

    def keys(self) -> Iterable[str]:
        return list(self._store)

    def read(self, key: str) -> Mapping[str, torch.Tensor]:
        return self._store[key]

    def writer(self, key: str, manifest: Manifest) -> MemoryWriter:
        return MemoryWriter(self._store, key, manifest)


Carried = tuple[Unit, Tensors, Iterable[Put]]  # a unit, what was combined for it, and the next values of its blocks
ReportedTensors = dict[str, Tensors]  # unit -> those of its combined values that the aggregator needs after the round


class Carrier(Protocol):
    """Computation of one aggregator's rounds. The bits do not depend on it."""

    def carry(self, aggregator: Blockwise, vault: Vault, updates: Sequence[PartUpdate]) -> ReportedTensors:
        """Write the next values of all units into the vault, and return what is reported, in the order of the units."""


class InTurn:
    """Carrier that computes everything in this process, a unit at a time."""

    def carry(self, aggregator: Blockwise, vault: Vault, updates: Sequence[PartUpdate]) -> ReportedTensors:
        return written(aggregator, vault, updates, in_turn(aggregator, aggregator.units(), updates))


IN_TURN = InTurn()


class MadeOfSettings:
    """Base of the built-in aggregators, with the parts of which each is made (fedserver.lab.build.AggregatorClass)."""

    def __init__(
        self, settings: Any, vault: Vault, seed: int, components: Mapping[str, list[str]], carrier: Carrier = IN_TURN
    ) -> None:
        self._settings, self._vault, self._carrier = settings, vault, carrier
        self._seed, self._components = seed, components


def written(aggregator: Blockwise, vault: Vault, updates: Sequence[PartUpdate], carried: Iterable[Carried]) -> ReportedTensors:
    """Write the values of units, one tensor after the other, into the vault."""
    reported: ReportedTensors = {}
    with ExitStack() as opened:
        writers = {key: opened.enter_context(vault.writer(key, kept)) for key, kept in aggregator.kept(updates).items()}
        for unit, combined, puts in carried:
            for key, name, value in aggregator.completed(puts, updates):
                writers[key].put(name, value)
            reported[unit.name] = {name: combined[name] for name in aggregator.reported}
    return reported


def in_turn(aggregator: Blockwise, units: Iterable[Unit], updates: Sequence[PartUpdate]) -> Iterator[Carried]:
    """Compute these units in this process."""
    for unit in units:
        combined = aggregator.combine(unit, [aggregator.partial(block, updates) for block in unit.blocks], updates)
        yield unit, combined, chain.from_iterable(aggregator.apply(block, combined, updates) for block in unit.blocks)
