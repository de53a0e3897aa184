"""Memory and time of a simulation of very many devices, of which few train in a round.

`python -m benchmarks.many_devices`: 10,000 devices with 60 samples each, MLR 60 x 10, 50 devices in a round. The peak is of the
whole process: Python, torch, all samples, and all devices' state. Ordinary models are left out: they take longer than rounds.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import click
import msgspec
import numpy as np
import torch

import attune
from benchmarks.machine import machine
from benchmarks.usage import status_bytes

FEATURES, CLASSES, SAMPLES = 60, 10, 80  # a quarter of the samples is held out for testing
SETTINGS = {"train.local_steps": 20, "train.batch_size": 20, "train.validation": 0.0}


@click.command()
@click.option("--devices", default=10_000, show_default=True)
@click.option("--cohort", default=50, show_default=True)
@click.option("--rounds", default=20, show_default=True)
@click.option("--method", default="fedavg", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=Path(__file__).parent / "results" / "many_devices.json")
def main(devices: int, cohort: int, rounds: int, method: str, out: Path) -> None:
    """Run the simulation once, and write its peak of memory and its time."""
    torch.set_num_threads(1)
    draw = np.random.default_rng(0)
    rule = draw.normal(size=(FEATURES, CLASSES))
    shards = {}
    for number in range(devices):
        x = draw.normal(size=(SAMPLES, FEATURES)).astype(np.float32)
        shards[f"device{number:05}"] = (x, (x @ rule).argmax(axis=1))
    before, idle, wall, cpu = machine(), status_bytes(os.getpid(), "VmRSS"), time.perf_counter(), time.process_time()
    settings = SETTINGS | {"round.clients": cohort, "round.evaluate_each_last": 0}
    result = attune.simulate(shards, method, "mlr", rounds, 0, settings, executor="stacked", baseline="none", progress=False)
    report = {
        "what": "one simulation in one process; peak of its memory, and of that what samples, Python and torch took before",
        "machine": before,
        "devices": devices,
        "cohort": cohort,
        "rounds": rounds,
        "method": method,
        "wall_s": round(time.perf_counter() - wall, 1),
        "processor_s": round(time.process_time() - cpu, 1),
        "before_mib": idle >> 20,
        "peak_mib": status_bytes(os.getpid(), "VmHWM") >> 20,
        "mean_accuracy": result.table().mean("accuracy"),
    }
    out.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    click.echo(msgspec.json.encode(report).decode())


if __name__ == "__main__":
    main()
