"""Bytes of a round that pass through the server when updates and state are in S3: in the server alone, and on workers.

`python -m benchmarks.cluster_store --ledger postgresql://... --blobs s3://...` with an empty database and prefix. Workers are
in this process, for only bytes are measured: those of the serialised messages, and what the server reads and writes in S3. Its
cache is empty before each round, as after direct transfers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, cast

import click
import msgspec
import torch

from attune.common import aio
from attune.common.exchange.transform import PartUpdate
from attune.common.wire.blobs import Blob
from attune.common.wire.files import TensorFile, write_tensors
from attune.common.wire.tensors import Cast, manifest_of
from attune.features.cluster.cluster_carrier import cluster_maker
from attune.features.cluster.worker_pool import WorkerPool
from attune.features.cluster.workers import StoreWorker
from attune.features.remote.s3 import S3Blobs
from attune.features.remote.s3_objects import S3Objects
from attune.features.remote.storage import RemoteStorage
from attune.fedserver.lab.build import AggregatorSpec, made
from attune.fedserver.lab.vault import StateVault
from attune.fedserver.stores.checked_blobs import OBJECTS
from benchmarks.cluster_lab import spec_of
from benchmarks.machine import machine

S, P, COMPONENTS = 16, 1_000_000, 8  # clients, weights of each client, components that are mixed separately
WORKERS = 2
MIB = 1 << 20


class CountingObjects(S3Objects):
    """The server's objects, with the bytes that it reads and writes."""

    def __init__(self, objects: S3Objects) -> None:
        super().__init__(objects.access)
        self.read_bytes = self.written_bytes = 0

    def range(self, key: str, start: int, length: int) -> memoryview:
        data = super().range(key, start, length)
        self.read_bytes += len(data)
        return data

    def pieces(self, key: str) -> Any:
        for piece in super().pieces(key):
            self.read_bytes += len(piece)
            yield piece

    def write(self, key: str, content: bytes | Path) -> bool:
        self.written_bytes += content.stat().st_size if isinstance(content, Path) else len(content)
        return super().write(key, content)


class StoreCall:
    """Call of a worker of this process, which is carried out when its result is awaited."""

    def __init__(self, cluster: CountingCluster, method: str, arguments: tuple[Any, ...]) -> None:
        self._cluster, self._method, self._arguments = cluster, method, arguments

    def result(self) -> Any:
        value = getattr(StoreWorker(1), self._method)(*map(arrived, self._arguments))
        self._cluster.up += size_of(value)
        return arrived(value)


class CountingCluster:
    """Workers of this process, with the bytes of all messages. What is shared is sent once."""

    def __init__(self, size: int) -> None:
        self.size, self.down, self.up = size, 0, 0
        self._shared: list[Any] = []

    def start_worker(self) -> CountingCluster:
        return self

    def call(self, method: str, *arguments: Any) -> StoreCall:
        self.down += sum(size_of(one) for one in arguments if not any(one is shared for shared in self._shared))
        return StoreCall(self, method, arguments)

    def share(self, value: Any) -> Any:
        self.down += size_of(value)
        self._shared.append(value)
        return value

    def end(self) -> None:
        """No-op: these workers do not end."""

    def close(self) -> None:
        """No-op."""


def size_of(value: Any) -> int:
    """Return the bytes of a message."""
    return len(ForkingPickler.dumps(value))


def arrived(value: Any) -> Any:
    """Return a message as the other side gets it."""
    return ForkingPickler.loads(ForkingPickler.dumps(value))


def stored(blobs: S3Blobs, number: int, client: str) -> Blob:
    """Write random values as a client's update into S3."""
    values = {name: torch.randn(tensor.shape) for name, tensor in layers().items()}
    return write_tensors(partial(blobs.create, f"inbox/train-{number}-{client}/part.safetensors"), values)


def layers() -> dict[str, torch.Tensor]:
    return {f"layer{n}": torch.zeros(P // COMPONENTS) for n in range(COMPONENTS)}


def measured(spec: AggregatorSpec, cluster: CountingCluster | None, blobs: S3Blobs) -> dict[str, float]:
    """Return MiB of the second round: in the first one no client has a value."""
    objects = blobs._objects = blobs.ranges.objects = blobs._cache._objects = CountingObjects(blobs._objects)
    vault = StateVault(blobs, spec.part, [], 0)
    aggregator = cluster_maker(WorkerPool(cast(Any, cluster)))(spec, vault) if cluster else made(spec, vault)
    aggregator.start(layers())
    vault.settle()
    figures: dict[str, float] = {}
    for number in (1, 2):
        written = {f"c{i:03}": stored(blobs, number, f"c{i:03}") for i in range(S)}
        blobs._cache.drop(sorted(objects.keys(OBJECTS)))
        manifest = manifest_of(layers())
        updates = [PartUpdate(client, 1, Cast(TensorFile(blobs.open(blob)), manifest)) for client, blob in written.items()]
        if cluster is not None:
            cluster.down = cluster.up = 0
        objects.read_bytes = objects.written_bytes = 0
        aggregator.close_round(updates)
        figures = {
            "read_mib": round(objects.read_bytes / MIB, 3),
            "written_mib": round(objects.written_bytes / MIB, 3),
            "to_workers_mib": round(cluster.down / MIB, 3) if cluster else 0.0,
            "from_workers_mib": round(cluster.up / MIB, 3) if cluster else 0.0,
        }
        vault.settle()
    blobs.remove([name for area in ("state/", "inbox/") for name in blobs.names(area)])
    return figures


def subjects() -> Mapping[str, AggregatorSpec]:
    components = {f"layer{n}": [f"layer{n}"] for n in range(COMPONENTS)}
    return {
        "mean": spec_of("mean", components),
        "mcsa": spec_of("attention", components),
        "median": spec_of("mean", components, robust="median"),
    }


@click.command()
@click.option("--ledger", required=True)
@click.option("--blobs", required=True)
@click.option("--out", type=click.Path(path_type=Path), default=Path(__file__).parent / "results" / "cluster_store.json")
def main(ledger: str, blobs: str, out: Path) -> None:
    """Measure a round in the server alone, and one on workers."""
    torch.set_num_threads(1)
    rows = dict[str, dict[str, dict[str, float]]]()
    sizes = {"clients": S, "weights": P, "components": COMPONENTS}
    with tempfile.TemporaryDirectory() as folder:
        storage = RemoteStorage(Path(folder), ledger, blobs)
        storage.create()
        for place in ("server", "workers"):
            for name, spec in subjects().items():
                cluster = CountingCluster(WORKERS) if place == "workers" else None
                rows.setdefault(place, {})[name] = measured(spec, cluster, storage.blobs)
                click.echo(f"{place}, {name}: {rows[place][name]}")
        aio.run(storage.close())
    report = {"what": (__doc__ or "").splitlines()[0], "machine": machine(), "sizes": sizes, "rows": rows}
    out.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


if __name__ == "__main__":
    main()
