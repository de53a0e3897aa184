"""A whole experiment in one process: FedMCSA's Synthetic at full length, with all devices training in every round.

`python -m benchmarks.long_simulation`: 100 devices of Synthetic(0.5, 0.5), MLR, 20 steps of 20 samples, evaluated every tenth
round and after each of the last 20. The seconds of training are those of the stacked steps of the same run. The rest, by device
and round, is the overhead: serving, evaluating before and after, handing in, aggregating, keeping, and starting.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

import attune
from attune.fedclient.work.executor import StackedExecutor
from attune.fedclient.work.objectives.descent import Descent
from attune.fedclient.work.stacked.lockstep import Stacked
from benchmarks.federation import Home
from benchmarks.machine import machine

SETTINGS = {
    "round.train": "all", "round.clients": 20, "train.local_steps": 20, "train.batch_size": 20, "train.lr": 0.02,
    "train.momentum": 0.0, "train.clip_norm": 0.0, "train.validation": 0.0,
}  # fmt: skip


class Timed(Stacked):
    """Training whose processor seconds are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.training_s = 0.0

    def _computed(self, key: Hashable, jobs: Sequence[Any]) -> list[Any]:
        began = time.thread_time()
        found = super()._computed(key, jobs)
        self.training_s += (time.thread_time() - began) if isinstance(jobs[0], Descent) else 0.0
        return found


def measure(shards: Path, method: str, rounds: int, every: int, last: int) -> dict[str, Any]:
    """Run once. Return wall and processor seconds, and the share of training in them."""
    side = StackedExecutor()
    side.stacked = timed = Timed()
    devices = len(list(shards.glob("*/")))
    settings = SETTINGS | {"round.evaluate_every": every, "round.evaluate_each_last": last}
    wall, cpu = time.perf_counter(), time.process_time()
    result = attune.simulate(f"{shards}/*", method, "mlr", rounds, 0, settings, executor=side, progress=False)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "method": method,
        "devices": devices,
        "rounds": rounds,
        "evaluate_every": every,
        "evaluate_each_last": last,
        "wall_s": round(wall, 1),
        "processor_s": round(cpu, 1),
        "training_s": round(timed.training_s, 1),
        "overhead_ms": round(1000 * (cpu - timed.training_s) / (devices * rounds), 3),
        "one_by_one": result.one_by_one,
    }


@click.command()
@click.option("--devices", default=100)
@click.option("--rounds", default=800)
@click.option("--every", default=10, help="Interval, in rounds, of evaluations on all devices.")
@click.option("--last", default=20, help="Number of last rounds that are all evaluated.")
@click.option("--method", default="fedmcsa")
@click.option("--out", type=click.Path(path_type=Path), default=Path(__file__).parent / "results" / "long_simulation.json")
def main(devices: int, rounds: int, every: int, last: int, method: str, out: Path) -> None:
    """Make the shards, run the experiment, and write the figures."""
    with tempfile.TemporaryDirectory(prefix="attune-simulated-") as scratch:
        flags = ("--scheme", "synthetic", "--alpha", "0.5", "--set", "beta=0.5", "--clients", devices, "--seed", 0)
        Home(Path(scratch)).run("fedclient", "partition", *flags, "--out", Path(scratch) / "shards")
        found = measure(Path(scratch) / "shards", method, rounds, every, last)
    click.echo(msgspec.json.encode(found).decode())
    report = {
        "what": "one experiment in one process, one thread, devices stacked; overhead in ms of processor a device and round",
        "machine": machine(),
        "run": found,
    }
    out.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


if __name__ == "__main__":
    main()
