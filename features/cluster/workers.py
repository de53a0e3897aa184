"""Methods of one worker, and of one that reaches the objects of S3 itself: it reads columns, and writes the next values there.

Tensors travel as bytes of numpy arrays, which Ray does not copy. With S3 no tensor passes through the server. A worker writes
the next values of its columns as a piece: for each vault key a row of them. When all pieces are written, workers assemble each
key's blob out of its rows, hash it and write it under its digest. A method that is called again writes the same bytes under the
same keys.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from msgspec.structs import replace

from attune.common.errors import LedgerBusy
from attune.common.exchange.transform import PartUpdate
from attune.common.wire.digest import digest_of, file_name
from attune.common.wire.header import Manifest, layout_of
from attune.common.wire.tensors import DTYPES, Tensors, is_finite, manifest_of, views
from attune.fedserver.lab.aggregators.base import Block, Blockwise, MemoryVault, Put, Unit, read_into
from attune.fedserver.lab.build import AggregatorSpec, made
from attune.fedserver.lab.vault import NotFinite
from attune.fedserver.stores.checked_blobs import OBJECTS

if TYPE_CHECKING:
    from attune.features.remote.object_source import ObjectRanges
    from attune.features.remote.s3_objects import S3Access, S3Objects

PARCEL_BYTES = 1 << 20  # of one client: a call takes milliseconds, even if it carries few bytes
Parcel = tuple[Block, ...]


@dataclass(frozen=True)
class UnitBatch:
    """Units that are combined together, and the parcels with all of their blocks, in the order of the units."""

    units: tuple[Unit, ...]
    parcels: tuple[Parcel, ...]


def unit_batches(units: Iterable[Unit], manifest: Manifest, parcel_bytes: int = PARCEL_BYTES) -> list[UnitBatch]:
    """Cut a round: a unit of many blocks has a batch of several parcels; small units of one block share a parcel."""
    batches: list[UnitBatch] = []
    small: list[Unit] = []

    def flush() -> None:
        if small:
            batches.append(UnitBatch(tuple(small), (tuple(block for unit in small for block in unit.blocks),)))
            small.clear()

    for unit in units:
        if len(unit.blocks) > 1:
            flush()
            batches.append(UnitBatch((unit,), tuple(_filled(unit.blocks, manifest, parcel_bytes))))
            continue
        blocks = [block for other in (*small, unit) for block in other.blocks]
        if small and (_bytes(blocks, manifest) > parcel_bytes or small[0].applied_here != unit.applied_here):
            flush()
        small.append(unit)
    flush()
    return batches


def columns_of(parcel: Parcel, manifest: Manifest) -> Manifest:
    """Return the part of the manifest that the parcel has."""
    return {name: manifest[name] for block in parcel for name in block.names}


def _filled(blocks: Sequence[Block], manifest: Manifest, parcel_bytes: int) -> Iterator[Parcel]:
    """Yield blocks in their order, as many together as fit."""
    parcel: Parcel = ()
    for block in blocks:
        if parcel and _bytes((*parcel, block), manifest) > parcel_bytes:
            yield parcel
            parcel = ()
        parcel = (*parcel, block)
    yield parcel


def _bytes(blocks: Iterable[Block], manifest: Manifest) -> int:
    """Return the size of one client's tensors in these blocks."""
    return sum(manifest[name].size_bytes for block in blocks for name in block.names)


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


AT_ONCE = 16  # ranges that are read, and blobs that are assembled, at the same time
AHEAD_BYTES = 256 << 20  # of a cohort's columns that are read before any is used; larger ones are read as they are used


class PresentValues:
    """The vault as a worker knows it: all keys, and where the values lie that it needs. It cannot be written to."""

    def __init__(self, keys: Sequence[str], values: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        self._keys, self._values = list(keys), dict(values)

    def keys(self) -> list[str]:
        return self._keys

    def read(self, key: str) -> Mapping[str, torch.Tensor]:
        return self._values[key]


@dataclass(frozen=True)
class StoredRound:
    """Places of the updates and the present values of a round. It has none of their bytes, and no keys to the store."""

    spec: AggregatorSpec
    updates: Sequence[PartUpdate]
    present: PresentValues
    ranges: ObjectRanges


@dataclass(frozen=True)
class Row:
    """Next values of one vault key in a piece: bytes [start, end), in the layout of `pack`, and their digest."""

    start: int
    end: int
    manifest: Manifest
    digest: str


@dataclass(frozen=True)
class Piece:
    """Object with the next values of some columns."""

    object: str
    rows: Mapping[str, Row]  # by vault key


@dataclass(frozen=True)
class WrittenBlob:
    """Blob that a worker has written and hashed."""

    key: str  # of the vault
    digest: str
    size: int
    object: str
    chunks: bytes  # digests of its chunks


class StoreWorker(ClusterWorker):
    """A worker's methods. Each gets the access to the store with its call, and keeps it no longer."""

    def sums(self, access: S3Access, round_: StoredRound, parcel: Parcel) -> list[PackedTensors]:
        """Return the partial of each block of a unit that has more blocks elsewhere."""
        aggregator, updates = _opened(_objects(access), round_, parcel)
        return [pack(aggregator.partial(block, updates)) for block in parcel]

    def values(
        self, access: S3Access, round_: StoredRound, parcel: Parcel, combined: Sequence[PackedTensors], piece: str
    ) -> Piece:
        """Write the next values of blocks, from what was combined for the unit of each."""
        objects = _objects(access)
        aggregator, updates = _opened(objects, round_, parcel)
        applied = (
            put
            for block, packed in zip(parcel, combined, strict=True)
            for put in aggregator.apply(block, unpack(packed), updates)
        )
        return _written(objects, piece, aggregator.completed(applied, updates))

    def whole(
        self, access: S3Access, round_: StoredRound, units: Sequence[Unit], piece: str
    ) -> tuple[Piece, list[PackedTensors]]:
        """Carry out units with all of their blocks, and return what is reported of each."""
        objects = _objects(access)
        aggregator, updates = _opened(objects, round_, tuple(block for unit in units for block in unit.blocks))
        reported: list[PackedTensors] = []

        def puts() -> Iterator[Put]:
            for unit in units:
                combined = aggregator.combine(unit, [aggregator.partial(block, updates) for block in unit.blocks], updates)
                reported.append(pack({name: combined[name] for name in aggregator.reported}))
                for block in unit.blocks:
                    yield from aggregator.completed(aggregator.apply(block, combined, updates), updates)

        return _written(objects, piece, puts()), reported

    def assemble(
        self, access: S3Access, pieces: Sequence[Piece], manifests: Mapping[str, Manifest], token: str
    ) -> list[WrittenBlob]:
        """Write the blobs of some vault keys.

        Args:
            access: The store.
            pieces: All pieces of the round.
            manifests: Dtype and shape of the tensors of each key.
            token: The end of the names of the objects.
        """
        objects = _objects(access)
        with ThreadPoolExecutor(AT_ONCE) as threads:
            jobs = [threads.submit(_assembled, objects, key, manifest, pieces, token) for key, manifest in manifests.items()]
            return [job.result() for job in jobs]


def _objects(access: S3Access) -> S3Objects:
    """Return the store. A worker that never uses one needs no package for it."""
    from attune.features.remote.s3_objects import S3Objects

    return S3Objects(access)


def _opened(objects: S3Objects, round_: StoredRound, parcel: Parcel) -> tuple[Blockwise, list[PartUpdate]]:
    """Return the aggregator and the updates, with the parcel's columns in memory if they are not too many."""
    round_.ranges.objects = objects
    vault: Any = round_.present
    aggregator = cast(Blockwise, made(round_.spec, vault))
    columns = columns_of(parcel, round_.updates[0].source.manifest)
    if sum(spec.size_bytes for spec in columns.values()) * len(round_.updates) > AHEAD_BYTES:
        return aggregator, list(round_.updates)
    with ThreadPoolExecutor(AT_ONCE) as threads:
        read = list(threads.map(lambda update: pack(update.tensors, columns), round_.updates))
    return aggregator, [replace(update, tensors=unpack(packed)) for update, packed in zip(round_.updates, read, strict=True)]


def _written(objects: S3Objects, piece: str, puts: Iterator[Put]) -> Piece:
    """Write next values as the object `piece`.

    Raises:
        NotFinite: A value is NaN or infinite.
    """
    values: dict[str, Tensors] = {}
    for key, name, value in puts:
        if not is_finite(value):
            raise NotFinite(f"{name} of {key} would not be finite")
        values.setdefault(key, {})[name] = value
    rows, data, start = dict[str, Row](), list[bytes](), 0
    for key in list(values):
        packed = pack(values.pop(key))
        data.append(packed.data.tobytes())
        rows[key] = Row(start, start + len(packed.data), packed.manifest, digest_of(data[-1]))
        start += len(packed.data)
    objects.write(piece, b"".join(data))
    return Piece(piece, rows)


def _assembled(objects: S3Objects, key: str, manifest: Manifest, pieces: Sequence[Piece], token: str) -> WrittenBlob:
    """Write the blob of one vault key out of its rows.

    Raises:
        LedgerBusy: A piece is damaged; the round is carried out again.
    """

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for piece in pieces:
            if (row := piece.rows.get(key)) is not None:
                data = objects.range(piece.object, row.start, row.end - row.start)
                if digest_of(data) != row.digest:
                    raise LedgerBusy(f"{objects.url}: a piece of the next state has other bytes than were written", "blobs")
                yield from unpack(PackedTensors(row.manifest, np.frombuffer(data, dtype=np.uint8))).items()

    def name_of(digest: str) -> str:
        return f"{OBJECTS}{file_name(digest)}.{token}"

    blob, chunks = objects.write_tensors(manifest, tensors(), name_of)
    return WrittenBlob(key, blob.digest, blob.size, name_of(blob.digest), chunks)
