"""What `fedserver --lab ray` costs: a call, bytes to workers and back, mixing; and whole rounds beside those of one process.

`python -m benchmarks.cluster_lab`, with Ray. Terms, not speed-ups: all workers share the cores of one machine. State is in
memory (no disk); of a round's bytes each is counted once, where it leaves or reaches the server. --lab: more places to measure.
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

from attune.common.methods.method import PartKind
from attune.common.methods.settings.aggregators import SETTINGS
from attune.common.wire.tensors import manifest_of
from attune.fedserver import cluster_environment
from attune.fedserver.lab.aggregators.base import Aggregator, PartUpdate
from attune.fedserver.lab.build import AggregatorSpec, made
from attune.fedserver.lab.cluster.columns import columns_of
from attune.fedserver.lab.cluster.connect import connect
from attune.fedserver.lab.cluster.crew import Ticket, Worker
from attune.fedserver.lab.cluster.make import maker
from attune.fedserver.lab.cluster.place import Place
from attune.fedserver.lab.cluster.rows import sent
from attune.fedserver.lab.cluster.team import Team
from attune.fedserver.lab.vault import StateVault
from attune.fedserver.stores.memory import MemoryBlobs
from benchmarks.machine import machine

WORKERS = (1, 2, 4)
S, P, COMPONENTS = 16, 4_000_000, 8  # clients, weights of each, components that are mixed by themselves
COHORTS = (8, 16, 32, 64)
HIDDEN, GENERATED, HEADS, CLIENTS = 64, 1 << 18, 4, 8  # of the hypernetwork
TRANSFER = 1 << 24  # numbers, 64 MiB
TIMES = 3


class Counted:
    """A worker whose bytes are counted, both ways. Implements cluster.crew.Worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self.down, self.up = worker, 0, 0

    def ask(self, method: str, *arguments: Any) -> Ticket:
        self.down += bytes_in(arguments)
        return CountedTicket(self, self._worker.ask(method, *arguments))

    def end(self) -> None:
        self._worker.end()


class CountedTicket:
    def __init__(self, worker: Counted, ticket: Ticket) -> None:
        self._worker, self._ticket = worker, ticket

    def answer(self) -> Any:
        found = self._ticket.answer()
        self._worker.up += bytes_in(found)
        return found


def bytes_in(value: Any) -> int:
    """Of all arrays in a message."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(bytes_in, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(bytes_in, value))
    ours = type(value).__module__.startswith("attune") and hasattr(value, "__dict__")
    return bytes_in(list(vars(value).values())) if ours else 0


def best_s(work: Callable[[], object], times: int = TIMES) -> float:
    found = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found)


def terms(team: Team) -> dict[str, float]:
    """Milliseconds of a call, by itself and of 64 at once; seconds for a GiB to a worker and back."""
    worker = team.seats[0].worker
    calls = [best_s(lambda: worker.ask("facts").answer(), 1) for _ in range(50)]
    many = best_s(lambda: [ticket.answer() for ticket in [worker.ask("facts") for _ in range(64)]])
    job, heads = job_of("hypernetwork", {"h": ["x"]}, embedding_dim=8, hidden=HIDDEN), ("generated", 0)
    updates = [PartUpdate(f"c{i}", 1, {"x": torch.randn(TRANSFER // 8)}) for i in range(8)]
    columns = columns_of(updates, manifest_of(updates[0].tensors))
    weight = sent({"head.h.weight": torch.randn(TRANSFER // HIDDEN, HIDDEN)})
    worker.ask("hold", heads, job, sent({"x": torch.zeros(8)})).answer()
    worker.ask("fill", heads, weight).answer()
    gib = 4 * TRANSFER / 2**30
    return {
        "call_ms": 1000 * median(calls),
        "call_of_64_ms": 1000 * many / 64,
        "down_s_per_gib": best_s(lambda: worker.ask("take", heads, columns).answer()) / gib,
        "up_s_per_gib": best_s(lambda: worker.ask("tensor", heads, "head.h.weight").answer()) / gib,
    }


def job_of(aggregator: str, components: dict[str, list[str]], **given: Any) -> AggregatorSpec:
    parts: dict[str, PartKind] = {"attention": "attended", "mean": "shared", "hypernetwork": "generated"}
    return AggregatorSpec(parts[aggregator], aggregator, SETTINGS[aggregator](**given), 0, components)


def opened(job: AggregatorSpec, initial: dict[str, torch.Tensor], team: Team | None) -> tuple[Aggregator, StateVault]:
    vault = StateVault(MemoryBlobs(), job.part, [], 0)
    aggregator = made(job, vault) if team is None else maker(team)(job, vault)
    aggregator.start(initial)
    vault.settle()
    return aggregator, vault


def rounds(job: AggregatorSpec, like: dict[str, torch.Tensor], clients: int, team: Team | None) -> dict[str, float]:
    """Seconds of a round, the best of some after a first one, which sends the state; and the bytes of the last."""
    aggregator, vault = opened(job, like, team)
    drawn = ({name: torch.randn(tensor.shape) for name, tensor in like.items()} for _ in range(clients))
    updates = [PartUpdate(f"c{i:03}", 1, tensors) for i, tensors in enumerate(drawn)]

    def play() -> None:
        aggregator.close_round(updates)
        vault.settle()

    play()
    found = {"round_s": best_s(play)}
    if team is not None:
        for seat in team.seats:
            seat.worker = Counted(seat.worker)
        play()
        counted = [seat.worker for seat in team.seats if isinstance(seat.worker, Counted)]
        found |= {"down_mib": sum(each.down for each in counted) / 2**20, "up_mib": sum(each.up for each in counted) / 2**20}
        for seat, each in zip(team.seats, counted, strict=True):
            seat.worker = each._worker
    return found


def mixing() -> dict[str, dict[str, float]]:
    """One process: seconds of a round's partials and applications, and what part of 4 S^2 P operations a second that is."""
    found = {}
    for clients in COHORTS:
        weights = P // COMPONENTS
        aggregator, _ = opened(job_of("attention", {"x": ["x"]}), {"x": torch.zeros(weights)}, None)
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


def measured(place: Place) -> dict[str, Any]:
    team = connect(place, threads=1)
    try:
        return {"terms": terms(team)} | {name: rounds(*subject, team) for name, subject in subjects()}
    finally:
        team.close()


def subjects() -> Iterable[tuple[str, tuple[AggregatorSpec, dict[str, torch.Tensor], int]]]:
    layers = {f"layer{n}": torch.zeros(P // COMPONENTS) for n in range(COMPONENTS)}
    components = {name: [name] for name in layers}
    yield "mcsa", (job_of("attention", components), layers, S)
    yield "median", (job_of("mean", components, robust="median"), layers, S)
    generated = {f"blocks.{n}.qkv": torch.randn(GENERATED // HEADS) for n in range(HEADS)}
    own = {name: [name] for name in generated}
    yield "hypernetwork", (job_of("hypernetwork", own, embedding_dim=32, hidden=HIDDEN), generated, CLIENTS)


@click.command()
@click.option("--lab", "labs", multiple=True, metavar="ray://HOST:PORT", help="A cluster that is there, with two workers.")
@click.option("--out", type=click.Path(path_type=Path), default=Path(__file__).parent / "results" / "cluster_lab.json")
def main(labs: tuple[str, ...], out: Path) -> None:
    """Measures one process, clusters of this machine with each number of workers, and those given."""
    torch.set_num_threads(1)
    cluster_environment.prepare()
    before, found = machine(), dict[str, Any]()
    found["one process"] = {name: rounds(*subject, None) for name, subject in subjects()} | {"mixing": mixing()}
    click.echo(f"one process: {found['one process']}")
    for place in (*(Place("ray", number) for number in WORKERS), *(Place(lab, 2) for lab in labs)):
        name = f"{place.lab.partition(':')[0]}{'://' if place.address else ''}, {place.workers} workers"
        found[name] = measured(place)
        click.echo(f"{name}: {found[name]}")
    sizes = {"clients": S, "weights": P, "components": COMPONENTS, "generated": GENERATED, "hidden": HIDDEN, "heads": HEADS}
    report = {"what": __doc__.splitlines()[0] if __doc__ else "", "machine": before, "sizes": sizes, "found": found}
    out.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


if __name__ == "__main__":
    main()
