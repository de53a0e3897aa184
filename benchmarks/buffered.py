"""Accuracy against time with devices of very different speed: buffered rounds beside synchronous ones.

`python -m benchmarks.buffered --out benchmarks/results` simulates 20 devices on a clock. A device is 1 to 20 times slower than
the fastest: a draw from a Pareto law (shape 1), cut off at 20. Each point is a whole run with another number of rounds, so that
its accuracy is that of a last evaluation by all devices. A run is written to buffered.csv as it ends, and is not repeated;
buffered.png shows all of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import numpy as np

from attune.common.durable import PUBLIC, write_file
from attune.common.pictures import figures
from attune.simulation.partition.datasets import load_dataset
from attune.simulation.partition.split import partition, write_shards
from attune.simulation.simulate import simulate
from attune.simulation.simulated_clock import SimulatedClock
from benchmarks.result_file import Results

DEVICES, SLOWEST = 20, 20.0
METHODS = ("fedavg", "fedtp", "fedmcsa")
SMALL = {
    "model.width": 16, "model.heads": 2, "model.depth": 1, "model.patch": 4, "train.local_epochs": 2, "train.local_steps": 0,
    "train.batch_size": 16, "train.lr": 0.05, "round.evaluate_each_last": 0,
}  # fmt: skip
# Rounds cost a different number of updates: 20, 10 (of 13 that begin), 5 and 10. The last buffer was chosen for FedTP among
# buffers of 3 to 14, rates of the server and exponents, on parts of the training data.
MODES: dict[str, tuple[dict[str, Any], Sequence[int]]] = {
    "synchronous": ({}, (3, 6, 12, 24)),
    "over-selection": ({"round.clients": 10, "round.over_selection": 0.3}, (6, 12, 24, 48)),
    "buffered": ({"round.mode": "buffered", "round.buffer": 5}, (20, 40, 80, 160)),
    "buffered by 10": ({"round.mode": "buffered", "round.buffer": 10}, (6, 10, 20, 40)),
}
KEY = ("method", "mode", "rounds", "seed")
COLUMNS = (*KEY, "seconds", "accuracy", "slow_half")


def speeds(names: Sequence[str], seed: int) -> dict[str, float]:
    """Return the seconds of an order on each device: at least 1, with a heavy tail, at most SLOWEST."""
    u_N = np.random.default_rng(seed).random(len(names))
    return dict(zip(names, (1 / (1 - u_N * (1 - 1 / SLOWEST))).tolist(), strict=True))


def run(shards: Sequence[Path], method: str, mode: str, rounds: int, seed: int) -> dict[str, Any]:
    """Return time, updates and mean accuracy of a whole run, over all devices and over the slower half of them."""
    names = [shard.name for shard in shards]
    seconds = speeds(names, seed)
    clock = SimulatedClock(seconds)
    result = simulate(
        [str(shard) for shard in shards], method, "vit", rounds, seed, SMALL | MODES[mode][0], progress=False, clock=clock
    )
    accuracy = {client["name"]: client["accuracy"] for client in result.status["clients"]}
    slow = sorted(names, key=seconds.__getitem__)[len(names) // 2 :]
    return {
        "seconds": round(clock.closed[rounds], 2),
        "accuracy": round(fmean(accuracy.values()), 4),
        "slow_half": round(fmean(accuracy[name] for name in slow), 4),
    }


def curves(rows: Sequence[dict[str, str]], method: str, mode: str) -> list[tuple[float, float]]:
    """Return (mean seconds, mean accuracy) over seeds for each number of rounds that all seeds have."""
    mine = [row for row in rows if (row["method"], row["mode"]) == (method, mode)]
    points, seeds = [], {row["seed"] for row in rows}
    for rounds in sorted({int(row["rounds"]) for row in mine}):
        same = [row for row in mine if int(row["rounds"]) == rounds]
        if {row["seed"] for row in same} != seeds:
            continue
        points.append((fmean(float(row["seconds"]) for row in same), fmean(float(row["accuracy"]) for row in same)))
    return points


def reaches(points: Sequence[tuple[float, float]], accuracy: float) -> float | None:
    """Return the seconds after which a curve reaches an accuracy, between two points on a straight line; None: never."""
    for (s0, a0), (s1, a1) in zip([(0.0, 0.0), *points], points, strict=False):
        if a1 >= accuracy:
            return s0 + (s1 - s0) * max(0.0, accuracy - a0) / (a1 - a0) if s0 else s1
    return None


def report(rows: Sequence[dict[str, str]]) -> None:
    """Print the seconds of each mode to the accuracies that synchronous rounds with over-selection reach."""
    for method in METHODS:
        by_mode = {mode: curves(rows, method, mode) for mode in MODES}
        for _, accuracy in by_mode["over-selection"]:
            times = {mode: reaches(points, accuracy) for mode, points in by_mode.items()}
            told = ", ".join(f"{mode} {'never' if s is None else f'{s:.0f} s'}" for mode, s in times.items())
            click.echo(f"{method} to {100 * accuracy:.1f} %: {told}")


def draw(rows: Sequence[dict[str, str]]) -> bytes:
    """Return the picture: for each method, mean accuracy over seeds against simulated seconds."""
    figure = figures.new(1.0 + 3.6 * len(METHODS), 4.0)
    grid = figure.subplots(1, len(METHODS))
    for axes, method in zip(grid, METHODS, strict=True):
        for colour, mode in zip(figures.COLOURS, MODES, strict=False):
            points = curves(rows, method, mode)
            axes.plot([s for s, _ in points], [100 * a for _, a in points], "o-", color=colour, label=mode, markersize=3)
        axes.set_title(method)
        axes.set_xscale("log")
        axes.set_xlabel("simulated time (orders of the fastest device)")
    grid[0].set_ylabel("accuracy (%), higher is better")
    grid[0].legend()
    return figures.file_of(figure)


@click.command()
@click.option("--seed", "seeds", multiple=True, type=int, default=(0, 1, 2), show_default=True)
@click.option("--points", type=click.IntRange(1, 4), default=4, show_default=True, help="Only the first points of each curve.")
@click.option("--method", "methods", multiple=True, type=click.Choice(METHODS), default=METHODS)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for buffered.csv and buffered.png.")
def main(seeds: tuple[int, ...], points: int, methods: tuple[str, ...], out: Path) -> None:
    """Run what is missing, then draw."""
    results = Results(out / "buffered.csv", COLUMNS)
    for seed in seeds:
        with tempfile.TemporaryDirectory(prefix="attune-buffered-") as folder:
            cut = partition(load_dataset("digits"), "dirichlet", DEVICES, seed, alpha=0.3)
            shards = write_shards(Path(folder) / "shards", cut)
            for rank in range(points):
                for method in methods:
                    for mode, (_, counts) in MODES.items():
                        measure(results, shards, method, mode, counts[rank], seed)
    rows = results.rows()
    report(rows)
    write_file(out / "buffered.png", draw(rows), PUBLIC)


def measure(results: Results, shards: Sequence[Path], method: str, mode: str, rounds: int, seed: int) -> None:
    """Measure one run, unless it is written already."""
    key = {"method": method, "mode": mode, "rounds": rounds, "seed": seed}
    if any(all(row[name] == str(value) for name, value in key.items()) for row in results.rows()):
        return
    results.add([key | run(shards, method, mode, rounds, seed)])
    click.echo(str(results.rows()[-1]), err=True)


if __name__ == "__main__":
    main()
