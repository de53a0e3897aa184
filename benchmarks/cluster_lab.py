"""Costs of `fedserver --lab ray`: a call, bytes to workers and back, mixing, and whole rounds, compared with one process.

`python -m benchmarks.cluster_lab`, with Ray. The figures are costs, not speed-ups, since all workers share the cores of one
machine. State is in memory, without a disk. Each byte of a round is counted once, when it leaves or reaches the server. `--lab`
names more clusters to measure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import click
import msgspec
import numpy as np
import torch

from attune.common.exchange.transform import PartUpdate
from attune.common.methods.method import PartKind
from attune.common.methods.settings.aggregators import SETTINGS
from attune.common.wire.tensors import manifest_of
from attune.features.cluster.cluster_carrier import cluster_maker
from attune.features.cluster.server import RayLab, prepare_ray
from attune.features.cluster.worker_pool import WorkerPool
from attune.features.cluster.workers import ClusterWorker, pack_updates
from attune.fedserver.lab.aggregators.base import Aggregator, Block
from attune.fedserver.lab.build import AggregatorSpec, made
from attune.fedserver.lab.vault import StateVault
from attune.simulation.memory import MemoryBlobs
from benchmarks.machine import machine

WORKERS = (1, 2, 4)
S, P, COMPONENTS = 16, 4_000_000, 8  # clients, weights of each client, components that are mixed separately
COHORTS = (8, 16, 32, 64)
TRANSFER = 1 << 24  # numbers, 64 MiB
TIMES = 3


class CountingPool(WorkerPool):
    """Pool that counts all bytes in both directions. Data that several calls share count once."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool, self.down, self.up = pool, 0, 0
        self.usable, self.members = True, pool.members

    def call(self, method: str, *arguments: Any) -> Any:
        self.down += bytes_in(arguments)
        return CountedCall(self, self._pool.call(method, *arguments))

    def share(self, value: Any) -> Any:
        self.down += bytes_in(value)
        return self._pool.share(value)


class CountedCall:
    def __init__(self, pool: CountingPool, call: Any) -> None:
        self._pool, self._call = pool, call

    def result(self) -> Any:
        value = self._call.result()
        self._pool.up += bytes_in(value)
        return value


def bytes_in(value: Any) -> int:
    """Count the bytes of all arrays in a message."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(bytes_in, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(bytes_in, value))
    if isinstance(value, msgspec.Struct):
        return bytes_in(msgspec.structs.asdict(value))
    ours = type(value).__module__.startswith("attune") and hasattr(value, "__dict__")
    return bytes_in(list(vars(value).values())) if ours else 0


def best_s(work: Callable[[], object], times: int = TIMES) -> float:
    found = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found)


def terms(pool: WorkerPool) -> dict[str, float]:
    """Measure milliseconds of a single call and of 64 calls at once, and seconds for a GiB to a worker and back."""
    calls = [best_s(lambda: pool.call("versions").result(), 1) for _ in range(50)]
    many = best_s(lambda: [call.result() for call in [pool.call("versions") for _ in range(64)]])
    spec = spec_of("mean", {"x": ["x"]})
    parcel = (Block("x", ("x",)),)
    updates = [PartUpdate("c0", 1, {"x": torch.randn(TRANSFER)})]
    manifest = manifest_of(updates[0].tensors)
    gib = 4 * TRANSFER / 2**30
    packed = pack_updates(updates, manifest)
    columns, computing_s = pool.share(packed), best_s(lambda: ClusterWorker(1).partial(spec, parcel, packed))
    there_and_back_s = best_s(lambda: pool.call("partial", spec, parcel, pool.share(pack_updates(updates, manifest))).result())
    back_s = best_s(lambda: pool.call("partial", spec, parcel, columns).result())
    return {
        "call_ms": 1000 * median(calls),
        "call_of_64_ms": 1000 * many / 64,
        "down_s_per_gib": (there_and_back_s - back_s) / gib,
        "up_s_per_gib": (back_s - computing_s) / gib,
    }


def spec_of(aggregator: str, components: dict[str, list[str]], **given: Any) -> AggregatorSpec:
    parts: dict[str, PartKind] = {"attention": "attended", "mean": "shared"}
    return AggregatorSpec(parts[aggregator], aggregator, SETTINGS[aggregator](**given), 0, components)


def opened(spec: AggregatorSpec, initial: dict[str, torch.Tensor], pool: WorkerPool | None) -> tuple[Aggregator, StateVault]:
    vault = StateVault(MemoryBlobs(), spec.part, [], 0)
    aggregator = made(spec, vault) if pool is None else cluster_maker(pool)(spec, vault)
    aggregator.start(initial)
    vault.settle()
    return aggregator, vault


def rounds(spec: AggregatorSpec, like: dict[str, torch.Tensor], clients: int, pool: WorkerPool | None) -> dict[str, float]:
    """Measure the seconds of a round (the best of some, after a first one) and its bytes."""
    aggregator, vault = opened(spec, like, pool)
    drawn = ({name: torch.randn(tensor.shape) for name, tensor in like.items()} for _ in range(clients))
    updates = [PartUpdate(f"c{i:03}", 1, tensors) for i, tensors in enumerate(drawn)]

    def play() -> None:
        aggregator.close_round(updates)
        vault.settle()

    play()
    figures = {"round_s": best_s(play)}
    if pool is not None:
        counting = CountingPool(pool)
        aggregator, vault = opened(spec, like, counting)
        play()
        figures |= {"down_mib": counting.down / 2**20, "up_mib": counting.up / 2**20}
    return figures


def mixing() -> dict[str, dict[str, float]]:
    """Measure mixing in one process: seconds of a round's partials and applications, and 4 S^2 P operations per second."""
    found = {}
    for clients in COHORTS:
        weights = P // COMPONENTS
        aggregator, _ = opened(spec_of("attention", {"x": ["x"]}), {"x": torch.zeros(weights)}, None)
        updates = [PartUpdate(f"c{i:03}", 1, {"x": torch.randn(weights)}) for i in range(clients)]
        (unit,) = aggregator.units()  # type: ignore[attr-defined]
        (block,) = unit.blocks

        def work(aggregator: Any = aggregator, unit: Any = unit, block: Any = block, updates: Any = updates) -> None:
            combined = aggregator.combine(unit, [aggregator.partial(block, updates)], updates)
            for _ in aggregator._mixed(block, combined["weights"], updates):
                pass

        seconds = best_s(work)
        found[str(clients)] = {"s": seconds, "gflop_per_s": 4 * clients**2 * weights / seconds / 1e9}
    return found


def measured(location: RayLab) -> dict[str, Any]:
    from attune.features.cluster.ray_cluster import connect  # imports Ray, which reads the environment then

    pool = connect(location, threads=1)
    try:
        return {"terms": terms(pool)} | {name: rounds(*subject, pool) for name, subject in subjects()}
    finally:
        pool.close()


def subjects() -> Iterable[tuple[str, tuple[AggregatorSpec, dict[str, torch.Tensor], int]]]:
    layers = {f"layer{n}": torch.zeros(P // COMPONENTS) for n in range(COMPONENTS)}
    components = {name: [name] for name in layers}
    yield "mcsa", (spec_of("attention", components), layers, S)
    yield "median", (spec_of("mean", components, robust="median"), layers, S)


@click.command()
@click.option("--lab", "labs", multiple=True, metavar="ray://HOST:PORT", help="A running cluster with two workers.")
@click.option("--out", type=click.Path(path_type=Path), default=Path(__file__).parent / "results" / "cluster_lab.json")
def main(labs: tuple[str, ...], out: Path) -> None:
    """Measure one process, clusters of this machine with each number of workers, and the given clusters."""
    torch.set_num_threads(1)
    prepare_ray()
    before, found = machine(), dict[str, Any]()
    found["one process"] = {name: rounds(*subject, None) for name, subject in subjects()} | {"mixing": mixing()}
    click.echo(f"one process: {found['one process']}")
    for location in (*(RayLab("ray", number) for number in WORKERS), *(RayLab(lab, 2) for lab in labs)):
        name = f"{location.lab.partition(':')[0]}{'://' if location.address else ''}, {location.workers} workers"
        found[name] = measured(location)
        click.echo(f"{name}: {found[name]}")
    sizes = {"clients": S, "weights": P, "components": COMPONENTS}
    report = {"what": __doc__.splitlines()[0] if __doc__ else "", "machine": before, "sizes": sizes, "found": found}
    out.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


if __name__ == "__main__":
    main()
