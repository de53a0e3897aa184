"""Segmentation of drawn shapes at sites with cameras of their own: what methods gain over each site alone.

`python -m benchmarks.shapes --seeds 0,1,2 --out benchmarks/results/shapes.csv`. An image shows a disc, a square, both or none
on a grey ground. Each site has its own brightness, contrast, noise and gradient of light, and few images. A row is a method and
a seed: the mean over sites of the Dice of what each site keeps, of Local, and how many sites gain.
"""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import fmean

import click
import numpy as np
import numpy.typing as npt

import attune

SITES, IMAGES, TESTED, SIDE, ROUNDS = 8, 4, 40, 16, 30
METHODS = ("fedavg+ft", "fedper", "fedbn")
DISC, SQUARE = 1, 2
SHADES = np.array([0.0, 0.5, 1.0])
SETTINGS = {"train.lr": 0.1, "train.batch_size": 4, "train.local_epochs": 3, "model.depth": 2}

Pair = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]


def site(number: int, images: int, seed: int = 0, side: int = SIDE) -> Pair:
    """Return images (N, side, side, 1) of a site and the label of every pixel, (N, side, side): 0, DISC or SQUARE."""
    camera, draw = np.random.default_rng([seed, number, 0]), np.random.default_rng([seed, number, 1])
    bright, contrast, noise = camera.uniform(-0.3, 0.3), camera.uniform(0.4, 1.0), camera.uniform(0.15, 0.3)
    slope = camera.uniform(-0.5, 0.5, 2)
    row, column = np.mgrid[:side, :side]
    y = np.zeros((images, side, side), np.int64)
    for mask in y:
        for shape in (DISC, SQUARE):
            if draw.random() < 0.75:
                size = draw.integers(2, max(3, side // 3))
                top, left = draw.integers(size, side - size, 2)
                away = np.hypot(row - top, column - left) if shape == DISC else np.maximum(abs(row - top), abs(column - left))
                mask[away <= size] = shape
    light = bright + slope[0] * (row / side - 0.5) + slope[1] * (column / side - 0.5)
    x = 0.5 + contrast * SHADES[y] + light + noise * draw.standard_normal(y.shape)
    return x[..., None].astype(np.float32), y


def data_of(seed: int) -> dict[str, tuple[npt.NDArray[np.generic], ...]]:
    """Return the training and test part of each site."""
    sites = {f"site{number}": site(number, IMAGES + TESTED, seed) for number in range(SITES)}
    return {name: (x[:IMAGES], y[:IMAGES], x[IMAGES:], y[IMAGES:]) for name, (x, y) in sites.items()}


@click.command()
@click.option("--seeds", default="0", show_default=True)
@click.option("--rounds", type=int, default=ROUNDS, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False))
def main(seeds: str, rounds: int, out: Path | None) -> None:
    """Simulate each method with each seed, and write a row for each."""
    rows = [("method", "seed", "rounds", "dice", "dice_local", "gain", "sites_better", "sites")]
    for seed in map(int, seeds.split(",")):
        runs = {
            name: attune.simulate(
                data_of(seed), name, rounds=rounds, seed=seed, settings=SETTINGS, baseline="none", executor="stacked",
                progress=False,
            )
            for name in ("local", *METHODS)
        }  # fmt: skip
        kept = {name: [client["accuracy_kept"] for client in run.status["clients"]] for name, run in runs.items()}
        local = kept.pop("local")
        for name, scores in kept.items():
            better = sum(score > alone for score, alone in zip(scores, local, strict=True))
            means = [round(value, 4) for value in (fmean(scores), fmean(local), fmean(scores) - fmean(local))]
            rows.append((name, seed, rounds, *means, better, SITES))
            click.echo(",".join(map(str, rows[-1])))
    if out is not None:
        with out.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    main()
