"""The server's optimisers of shared parts (fedserver/lab/aggregators/mean.py) with FedAvg, beside the plain mean and Local.

`python -m benchmarks.shared_optimisers --data heart_disease=PATH --out benchmarks/results/shared_optimisers.csv`. The tasks are
points of three recipes. For each optimiser the learning rates of the device and of the server are chosen on validation parts,
from one grid for all; then each seed runs with the chosen ones, on the test parts. A row is written as each run ends.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from attune.simulation.partition.datasets import DIGITS
from attune.simulation.simulate import simulate
from benchmarks.recipes.catalogue import Recipe, RecipePoint, get
from benchmarks.result_file import Results
from benchmarks.study import named, validation

POINTS = (("hospitals", 0), ("label-shift", 0), ("feature-shift", 2))  # a recipe, and the number of its point
DEVICE_LR = (0.03, 0.1, 0.3)
SERVER_LR = {"none": (None,), "momentum": (0.1, 0.3, 1.0), "adam": (0.003, 0.01, 0.03), "yogi": (0.003, 0.01, 0.03),
             "adagrad": (0.01, 0.03, 0.1)}  # fmt: skip
SEEDS = (0, 1, 2)
KEY = ("task", "optimiser", "lr", "shared_lr", "seed", "part")
COLUMNS = (*KEY, "accuracy", "constant")


def run(shards: Sequence[Path], recipe: Recipe, optimiser: str, lr: float, server: float | None, seed: int) -> dict[str, Any]:
    """Return the mean accuracies over devices of a whole federation with these settings."""
    options: dict[str, Any] = dict(recipe.settings) | {"train.lr": lr}
    if optimiser not in ("none", "local"):
        options |= {"method.shared_optimiser": optimiser, "method.shared_lr": server}
    method = "local" if optimiser == "local" else "fedavg"
    result = simulate(
        [str(shard) for shard in shards], method, None, recipe.rounds, seed, options, executor="stacked", progress=False
    )
    table = result.table()
    return {name: round(table.mean(name) or 0.0, 4) for name in ("accuracy", "constant")}


def measure(recipe: Recipe, point: RecipePoint, data: str, results: Results) -> None:
    """Measure what is missing of one task."""
    with tempfile.TemporaryDirectory(prefix="attune-optimisers-") as folder:
        for seed in SEEDS:
            shards = point.write(Path(folder) / f"{seed}", recipe.load(data, seed), seed)
            for optimiser, servers in ({"local": (None,)} | SERVER_LR).items():
                if seed == SEEDS[0]:
                    held = sorted(path.parent for path in validation(shards[0].parent, 0.25, 0).glob("*/train.npz"))
                    for lr in DEVICE_LR:
                        for server in servers:
                            add(results, recipe, held, optimiser, lr, server, seed, "validation")
                lr, server = chosen(results.rows(), recipe.name, optimiser)
                add(results, recipe, shards, optimiser, lr, server, seed, "test")


def add(
    results: Results,
    recipe: Recipe,
    shards: Sequence[Path],
    optimiser: str,
    lr: float,
    server: float | None,
    seed: int,
    part: str,
) -> None:
    """Run and write one row, if it is missing."""
    values = (recipe.name, optimiser, lr, "" if server is None else server, seed, part)
    key = dict(zip(KEY, map(str, values), strict=True))
    if not any(key.items() <= row.items() for row in results.rows()):
        results.add([key | run(shards, recipe, optimiser, lr, server, seed)])


def chosen(rows: Sequence[dict[str, str]], task: str, optimiser: str) -> tuple[float, float | None]:
    """Return the learning rates of device and server with the best accuracy on validation parts, the first of equal ones."""
    key = {"task": task, "optimiser": optimiser, "part": "validation"}
    best = max((row for row in rows if key.items() <= row.items()), key=lambda row: float(row["accuracy"]))
    return float(best["lr"]), float(best["shared_lr"]) if best["shared_lr"] else None


@click.command()
@click.option("--data", multiple=True, metavar="NAME=PATH", help="A recipe's data, by the file's name without suffix.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="A CSV file.")
def main(data: tuple[str, ...], out: Path) -> None:
    """Run what is left."""
    results, files = Results(out, COLUMNS), named(data)
    for name, place in POINTS:
        recipe = get(name)
        file = files.get(Path(recipe.data).stem) if recipe.data else DIGITS
        if file is None:
            click.echo(f"{name} is left out: it needs --data {Path(recipe.data).stem}=PATH", err=True)
            continue
        measure(recipe, recipe.points[place], str(file), results)


if __name__ == "__main__":
    main()
