"""The grid from which the default settings of local training were chosen, judged on validation parts of the training data.

`python -m benchmarks.settings --fashion-mnist PATH --out benchmarks/results/settings.csv`; every run is a real federation.
"""

from __future__ import annotations

import csv
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import click
import numpy as np

from attune.simulation.partition.datasets import load_dataset
from attune.simulation.partition.samples import Dataset
from attune.simulation.partition.split import partition, write_shards
from benchmarks.federation import federation
from examples.demo import shorten

GRID = [(0.01, 64, 0.0), (0.01, 16, 1.0), (0.03, 64, 1.0), (0.03, 32, 1.0), (0.03, 16, 1.0), (0.1, 32, 1.0)]  # lr, batch, clip
METHODS = ("fedtp", "fedavg")
DEVICES, CLASSES_EACH = 5, 2
COLUMNS = (
    "dataset",
    "method",
    "lr",
    "batch_size",
    "clip_norm",
    "rounds",
    "seed",
    "mean_accuracy",
    "lowest_accuracy",
    "seconds",
)


def validation_shards(dataset: Dataset, out: Path, seed: int) -> list[Path]:
    """Write shards whose test part is a quarter of the training part. The data set's own test part is not used."""
    draw = np.random.default_rng(seed).permutation(len(dataset.train_y))
    held, kept = draw[: len(draw) // 4], draw[len(draw) // 4 :]
    x, y = dataset.train_x, dataset.train_y
    inner = replace(dataset, train_x=x[kept], train_y=y[kept], test_x=x[held], test_y=y[held], more={})
    return write_shards(out, partition(inner, "pathological", DEVICES, seed, classes_per_client=CLASSES_EACH))


@click.command()
@click.option("--fashion-mnist", type=click.Path(exists=True), help="An .npz with the four arrays (default: without it).")
@click.option("--rounds", type=click.IntRange(1), default=15, show_default=True)
@click.option("--samples", type=click.IntRange(100), default=2000, show_default=True, help="Training samples of each data set.")
@click.option("--seed", type=int, default=7, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(fashion_mnist: str | None, rounds: int, samples: int, seed: int, out: Path) -> None:
    """Run the grid, and write a row as each federation ends."""
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for label, source in [("digits", "digits"), *([("fashion-mnist", fashion_mnist)] if fashion_mnist else [])]:
            dataset = shorten(load_dataset(source, seed), samples, seed)
            for lr, batch, clip in GRID:
                for method in METHODS:
                    row = run(dataset, method, (lr, batch, clip), rounds, seed)
                    writer.writerow({"dataset": label, **row})
                    file.flush()


def run(dataset: Dataset, method: str, setting: tuple[float, int, float], rounds: int, seed: int) -> dict[str, object]:
    """Run one federation with one setting."""
    lr, batch, clip = setting
    folder = Path(tempfile.mkdtemp(prefix="attune-settings-"))
    said = [f"train.lr={lr}", f"train.batch_size={batch}", f"train.clip_norm={clip}"]
    flags = ["--rounds", str(rounds), "--seed", str(seed), *(word for each in said for word in ("--set", each))]
    try:
        validation_shards(dataset, folder / "shards", seed)
        ended = federation(method, folder / "shards", flags)
    finally:
        shutil.rmtree(folder)
    accuracy = [client["accuracy"] for client in ended.status["clients"]]
    return {
        "method": method,
        "lr": lr,
        "batch_size": batch,
        "clip_norm": clip,
        "rounds": rounds,
        "seed": seed,
        "mean_accuracy": round(sum(accuracy) / len(accuracy), 4),
        "lowest_accuracy": round(min(accuracy), 4),
        "seconds": round(ended.seconds, 1),
    }


if __name__ == "__main__":
    main()
