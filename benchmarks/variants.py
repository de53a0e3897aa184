"""Variants of a model: 12 devices of digits with 20 training samples, half of them with a quarter of the parameters.

`python -m benchmarks.variants --out benchmarks/results/variants.csv` has a row for each seed and way; rows that are there are
not measured again. Accuracies are means over the devices of a size, on their own test samples, in percent.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import fmean
from typing import Any

import click

import attune
from attune.simulation.partition.datasets import load_dataset
from attune.simulation.partition.split import partition
from benchmarks.result_file import Results

DEVICES, SAMPLES, ROUNDS, SMALL = 12, 20, 40, "small"
LARGE_NET, SMALL_NET = {"channels": [16, 32], "hidden": [120, 84]}, {"channels": [8, 16], "hidden": [60, 42]}
COLUMNS = ("way", "seed", "small", "large", "parameters_small", "parameters_large", "seconds")
# Way -> method, network of the plan, and whether half of the devices have the small variant.
WAYS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "own network alone": ("local", LARGE_NET, True),
    "FedAvg within the variant": ("fedavg", LARGE_NET, True),
    "the same, fine-tuned": ("fedavg+ft", LARGE_NET, True),
    "FedAvg, all with the small network": ("fedavg", SMALL_NET, False),
    "closed form": ("analytic", {}, False),
}


def measured(way: str, seed: int) -> dict[str, Any]:
    """Run one federation, and return its row."""
    method, network, varied = WAYS[way]
    cut, started = partition(load_dataset("digits"), "dirichlet", DEVICES, seed=seed, alpha=0.3), time.monotonic()
    shards = {}
    for place, name in enumerate(cut.names):
        (x, y), test = cut.arrays(place, "train"), cut.arrays(place, "test")
        shards[name] = x[:SAMPLES], y[:SAMPLES], *test
    settings = {f"model.{key}": value for key, value in network.items()} | {"data.classes": list(range(10))}
    settings |= {"model.variant": [{"name": SMALL, **SMALL_NET}]} if varied else {}
    small = cut.names[::2]
    result = attune.simulate(
        shards,
        method,
        "convnet" if network else "closed-form",
        seed=seed,
        settings=settings if method == "analytic" else {**settings, "round.rounds": ROUNDS},
        variants=dict.fromkeys(small, SMALL) if varied else {},
        baseline="none",
        executor="stacked",
        progress=False,
    )
    scores = {client["name"]: 100 * client["accuracy"] for client in result.status["clients"]}
    large = [name for name in cut.names if name not in small]
    sizes = {name: _parameters(result, name) for name in (small[0], large[0])}
    return {
        "way": way,
        "seed": seed,
        "small": round(fmean(scores[name] for name in small), 2),
        "large": round(fmean(scores[name] for name in large), 2),
        "parameters_small": sizes[small[0]],
        "parameters_large": sizes[large[0]],
        "seconds": round(time.monotonic() - started, 1),
    }


def _parameters(result: attune.SimulationResult, name: str) -> int:
    from attune.common.models.registry import build

    return sum(parameter.numel() for parameter in build(result.model(name).info.model, 0).parameters())


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True)
def main(out: Path, seeds: int) -> None:
    """Run what is left, one federation after the other."""
    results = Results(out, COLUMNS)
    known = {(row["way"], row["seed"]) for row in results.rows()}
    for seed in range(seeds):
        for way in WAYS:
            if (way, str(seed)) not in known:
                results.add([measured(way, seed)])


if __name__ == "__main__":
    main()
