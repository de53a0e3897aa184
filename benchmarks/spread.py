"""Cost of running devices in other processes: seconds of an order without computation, by the size of the model.

`python -m benchmarks.spread`: eight devices, two workers, FedAvg of a model of P values, of which a forward pass touches eight.
An order costs a + b P: `a` for orders, events and calls, `b` for each value that goes to a worker and comes back. "Driver" is
the processor time of the process with the server, the only part that is not divided among workers. The first round does not
count.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Literal

import click
import msgspec
import numpy as np
import torch

import attune
from benchmarks.machine import machine
from benchmarks.usage import tree_cpu_s

DEVICES, ROUNDS, WORKERS = 8, 6, 2
SIZES = (1_000, 100_000, 1_000_000, 4_000_000)
Name = Literal["sequential", "processes", "ray"]
NAMES: tuple[Name, ...] = ("sequential", "processes", "ray")


def measure(executor: Name, parameters: int) -> dict[str, float]:
    """Return the seconds of an order: wall time, the driver's processor time, and that of all processes."""
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(8, 4)).astype(np.float32), np.arange(8)
    shards = {f"device{number}": (x, y, x, y) for number in range(DEVICES)}
    stamps: list[tuple[float, float, float]] = []
    settings: dict[str, Any] = {
        "model.parameters": parameters, "model.tensors": 8, "train.local_steps": 1,
        "train.validation": 0.0, "round.evaluate_every": ROUNDS + 1, "round.evaluate_each_last": 0,
    }  # fmt: skip

    def heard(share: float) -> None:
        stamps.append((time.perf_counter(), time.process_time(), tree_cpu_s(os.getpid())))

    attune.simulate(
        shards, "fedavg", "benchmarks.model:make", ROUNDS, 0, settings, executor=executor, progress=heard, workers=WORKERS
    )
    first, last = stamps[DEVICES - 1], stamps[ROUNDS * DEVICES - 1]
    orders = (ROUNDS - 1) * DEVICES
    return dict(
        zip(("wall_s", "driver_s", "processor_s"), ((b - a) / orders for a, b in zip(first, last, strict=True)), strict=True)
    )


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path(__file__).parent / "results" / "spread.json")
def main(out: Path) -> None:
    """Measure each executor at each size, and fit a and b to the driver's seconds."""
    torch.set_num_threads(1)
    os.environ.setdefault("RAY_worker_niceness", "0")
    before, found = machine(), dict[str, Any]()
    for name in NAMES:
        sizes = {str(size): measure(name, size) for size in SIZES}
        b, a = np.polyfit(SIZES, [each["driver_s"] for each in sizes.values()], 1)
        found[name] = {"orders": sizes, "driver_ms_an_order": 1000 * float(a), "driver_ns_a_value": 1e9 * float(b)}
        click.echo(f"{name}: driver {1000 * a:.2f} ms an order + {1e9 * b:.2f} ns a value; {sizes}")
    report = {"what": __doc__.splitlines()[0] if __doc__ else "", "machine": before, "workers": WORKERS, "found": found}
    out.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


if __name__ == "__main__":
    main()
