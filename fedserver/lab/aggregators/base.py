"""Interface of an aggregator, and of the vault that holds its state, with a vault in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
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

    The class is called with (settings, vault, seed, components): its settings struct; the vault in which the part's state lies;
    the federation's seed; and for each component of the model the names of its tensors in this part.
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


class MadeOfSettings:
    """Base of the built-in aggregators, with the parts of which each is made (fedserver.lab.build.AggregatorClass)."""

    def __init__(self, settings: Any, vault: Vault, seed: int, components: Mapping[str, list[str]]) -> None:
        self._settings, self._vault, self._seed, self._components = settings, vault, seed, components
