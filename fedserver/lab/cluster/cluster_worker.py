"""Methods of one worker, and the form in which tensors travel: as bytes of numpy arrays, which Ray does not copy."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, cast

import numpy as np
import torch

from attune.common.exchange.transform import PartUpdate
from attune.common.wire.header import Manifest, layout_of
from attune.common.wire.tensors import DTYPES, Tensors, manifest_of, views
from attune.fedserver.lab.aggregators.base import Blockwise, MemoryVault, read_into
from attune.fedserver.lab.build import AggregatorSpec, made
from attune.fedserver.lab.cluster.parcels import Parcel


@dataclass(frozen=True)
class PackedTensors:
    """Tensors in one array of bytes, in the layout of a safetensors file; the header's place is empty."""

    manifest: Manifest
    data: np.ndarray[Any, np.dtype[np.uint8]]


def pack(tensors: Mapping[str, torch.Tensor], manifest: Manifest | None = None) -> PackedTensors:
    """Copy the tensors that the manifest names, or all."""
    manifest = manifest_of(tensors) if manifest is None else manifest
    layout = layout_of(manifest)
    bytes_B = torch.empty(layout.size, dtype=torch.uint8)
    for name, (start, end) in layout.spans.items():
        if start < end:
            read_into(tensors, name, bytes_B[start:end].view(DTYPES[manifest[name].dtype]))
    return PackedTensors(manifest, bytes_B.numpy())


def unpack(packed: PackedTensors) -> Tensors:
    """Return views of the tensors. Do not write to them: other processes may read the same memory."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        bytes_B = torch.from_numpy(packed.data)
    return views(bytes_B, layout_of(packed.manifest), "tensors of a worker")


@dataclass(frozen=True)
class PackedUpdate:
    """Some columns of a client's update."""

    client: str
    weight: float
    absent: int
    tensors: PackedTensors


def pack_updates(updates: Sequence[PartUpdate], manifest: Manifest) -> list[PackedUpdate]:
    """Read these columns of a cohort's updates from where they lie."""
    return [PackedUpdate(update.client, update.weight, update.absent, pack(update.tensors, manifest)) for update in updates]


def _unpack_updates(columns: Sequence[PackedUpdate]) -> list[PartUpdate]:
    return [PartUpdate(column.client, column.weight, unpack(column.tensors), column.absent) for column in columns]


@dataclass(frozen=True)
class WorkerVersions:
    """The worker's process on its machine, and the versions of its packages."""

    pid: int
    attune: str
    torch: str


class ClusterWorker:
    """A worker's methods.

    Args:
        threads: Threads of its computations: as many as the server's lab has, or sums of products would round differently.
    """

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)

    def versions(self) -> WorkerVersions:
        return WorkerVersions(os.getpid(), version("attune-fl"), torch.__version__)

    def partial(self, spec: AggregatorSpec, parcel: Parcel, columns: Sequence[PackedUpdate]) -> list[PackedTensors]:
        """Return the partial of each block."""
        aggregator, updates = _blockwise(spec), _unpack_updates(columns)
        return [pack(aggregator.partial(block, updates)) for block in parcel]

    def apply(
        self, spec: AggregatorSpec, parcel: Parcel, combined: Sequence[PackedTensors], columns: Sequence[PackedUpdate]
    ) -> list[dict[str, PackedTensors]]:
        """Return the next values of each block by vault key."""
        aggregator, updates = _blockwise(spec), _unpack_updates(columns)
        applied = []
        for block, packed in zip(parcel, combined, strict=True):
            values: dict[str, Tensors] = {}
            for key, name, value in aggregator.apply(block, unpack(packed), updates):
                values.setdefault(key, {})[name] = value
            applied.append({key: pack(tensors) for key, tensors in values.items()})
        return applied


def _blockwise(spec: AggregatorSpec) -> Blockwise:
    return cast(Blockwise, made(spec, MemoryVault()))  # only Blockwise aggregators use a carrier
