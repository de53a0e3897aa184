"""Processor time of a round under secure aggregation, as a multiple of a plain round, on one thread.

`python -m benchmarks.secure_round`. 50 simulated devices train one step of a linear model with 1,001,000 values. Server and
devices run in this process, so the figures are of all of them together: training, masks, files, digests and the sum. A round is
the difference between a simulation of several rounds and one of a single round. Both ways run in turn.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import click
import msgspec
import numpy as np
import torch

import attune
from benchmarks.machine import machine

DEVICES, FEATURES, CLASSES, SAMPLES, ROUNDS = 50, 1000, 1000, 8, 3
SETTINGS = {
    "train.local_steps": 1,
    "train.batch_size": SAMPLES,
    "train.evaluate": False,
    "train.validation": 0.0,
    "round.evaluate_each_last": 0,
    "round.take_back": 0.0,
    "method.bound_change": 0.0,
    "method.bound_samples": 0.0,
    "data.classes": list(range(CLASSES)),
}
WAYS: dict[str, dict[str, Any]] = {"plain": {}, "secure": {"privacy.secure_aggregation": True}}


def shards() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    draws = np.random.default_rng(0)
    return {
        f"device{number:02}": (
            draws.normal(size=(2 * SAMPLES, FEATURES)).astype("float32"),
            draws.integers(0, CLASSES, 2 * SAMPLES),
        )
        for number in range(DEVICES)
    }


def cpu_s(devices: dict[str, tuple[np.ndarray, np.ndarray]], rounds: int, given: dict[str, Any]) -> float:
    """Return the processor time of a simulation whose files lie on disk."""
    with TemporaryDirectory() as home:
        began = time.process_time()
        attune.simulate(
            devices, "fedavg", model="mlr", rounds=rounds, settings=SETTINGS | given, progress=False, home=Path(home) / "home"
        )
        return time.process_time() - began


@click.command()
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
@click.option("--out", type=click.Path(path_type=Path))
def main(repeats: int, out: Path | None) -> None:
    """Measure a round in both ways, and print it as JSON."""
    torch.set_num_threads(1)
    devices, times = shards(), {name: list[float]() for name in WAYS}
    for _ in range(repeats):
        for name, given in WAYS.items():
            several, single = (cpu_s(devices, rounds, given) for rounds in (1 + ROUNDS, 1))
            times[name].append((several - single) / ROUNDS)
    seconds = {name: round(median(values), 3) for name, values in times.items()}
    result = {
        "machine": machine(),
        "devices": DEVICES,
        "values": (FEATURES + 1) * CLASSES,
        "repeats": repeats,
        "processor_s": seconds,
        "ratio": round(seconds["secure"] / seconds["plain"], 2),
    }
    text = msgspec.json.format(msgspec.json.encode(result), indent=1).decode()
    click.echo(text)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
