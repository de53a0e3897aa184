"""What lives in a worker for rounds by columns: it carries out parcels, and holds the state of their columns between rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from attune.common.wire.header import Manifest
from attune.common.wire.tensors import Tensors
from attune.fedserver.lab.aggregators.base import Blockwise, MemoryWriter, PartUpdate
from attune.fedserver.lab.build import AggregatorSpec, made
from attune.fedserver.lab.cluster.parcels import Parcel
from attune.fedserver.lab.cluster.rows import Row, Sent, received, row_of, sent, tensors_in


@dataclass(frozen=True)
class Columns:
    """A parcel's columns of a cohort: for each client one row."""

    manifest: Manifest
    clients: Sequence[str]
    weights: Sequence[float]
    absent: int
    rows: Sequence[Row]

    def updates(self) -> list[PartUpdate]:
        each = zip(self.clients, self.weights, self.rows, strict=True)
        return [PartUpdate(client, weight, tensors_in(row, self.manifest), self.absent) for client, weight, row in each]


def columns_of(updates: Sequence[PartUpdate], manifest: Manifest) -> Columns:
    """These tensors of a cohort's updates, read from where they lie."""
    rows = [row_of(update.tensors, manifest) for update in updates]
    clients, weights = [update.client for update in updates], [update.weight for update in updates]
    return Columns(manifest, clients, weights, updates[0].absent, rows)


@dataclass(frozen=True)
class Before:
    """The state that a parcel is applied to: the keys that are read, and the rows of those that the worker does not hold."""

    keys: Sequence[str]
    rows: Mapping[str, Row]
    dropped: Sequence[tuple[str, int, str]] = ()  # part, parcel, key: what the worker need not hold any longer


@dataclass(frozen=True)
class After:
    """The next values of a parcel: for each block the tensors' names in the order in which they were put; by key a row."""

    names: Sequence[Sequence[str]]
    manifest: Manifest
    rows: Mapping[str, Row]


@dataclass
class Portion:
    """A worker's vault: the columns of one parcel. Implements aggregators.base.Vault for reading."""

    listed: Sequence[str]
    held: dict[str, Tensors] = field(default_factory=dict)

    def keys(self) -> Sequence[str]:
        return self.listed

    def read(self, key: str) -> Mapping[str, torch.Tensor]:
        return self.held[key]

    def writer(self, key: str, manifest: Manifest) -> MemoryWriter:
        raise NotImplementedError("values go back to the server's vault, which writes them")


class ColumnHand:
    """What it holds by parcel: of a vault's keys the columns, and what `partial` has begun."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], dict[str, Tensors]] = {}
        self._begun: dict[tuple[str, int], tuple[Blockwise, Portion, list[PartUpdate]]] = {}

    def partial(self, job: AggregatorSpec, parcel: Parcel, columns: Columns, keys: Sequence[str], keep: bool) -> list[Sent]:
        """The partial of each block. keep: the columns wait here for `apply`, which reads these keys."""
        begun = self._begin(job, columns, keys)
        aggregator, _, updates = begun
        found = [sent(aggregator.partial(block, updates)) for block in parcel.blocks]
        if keep:
            self._begun[job.part, parcel.number] = begun
        return found

    def apply(
        self,
        job: AggregatorSpec,
        parcel: Parcel,
        combined: Sequence[Sent],
        before: Before,
        manifest: Manifest,
        columns: Columns | None,
    ) -> After:
        """The next values of each block, which are held too. columns: where `partial` kept none."""
        for part, number, key in before.dropped:
            self._held.get((part, number), {}).pop(key, None)
        begun = self._begun.pop((job.part, parcel.number), None)
        if columns is not None:
            begun = self._begin(job, columns, before.keys)
        assert begun is not None  # noqa: S101 (`partial` kept the columns, in this life)
        aggregator, portion, updates = begun
        held = self._held.setdefault((job.part, parcel.number), {})
        for key, row in before.rows.items():
            held[key] = tensors_in(row.copy(), manifest)
        portion.held = {key: held[key] for key in before.keys}
        names: list[list[str]] = []
        values: dict[str, Tensors] = {}
        for block, each in zip(parcel.blocks, combined, strict=True):
            put: dict[str, None] = {}
            for key, name, value in aggregator.apply(block, received(each), updates):
                values.setdefault(key, {})[name] = value
                put[name] = None
            names.append(list(put))
        rows = {key: row_of(tensors, manifest) for key, tensors in values.items()}
        held.update({key: tensors_in(row, manifest) for key, row in rows.items()})
        return After(names, manifest, rows)

    def _begin(self, job: AggregatorSpec, columns: Columns, keys: Sequence[str]) -> tuple[Blockwise, Portion, list[PartUpdate]]:
        portion = Portion(keys)
        return cast(Blockwise, made(job, portion)), portion, columns.updates()
