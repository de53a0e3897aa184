"""Check of default models, learning rates and local epochs, on tasks that no table shows.

`python -m benchmarks.default_training --out benchmarks/results/default_training.csv`. Eight devices with few samples of unequal
classes (Dirichlet 0.5) train FedAvg. Rows that no device trains on score them. Two tasks of images and two of series
are drawn from seeds; the two tables are those of scikit-learn. Runs that the file has are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np
from sklearn.datasets import load_breast_cancer, load_wine

from attune.simulation.simulate import simulate
from benchmarks.result_file import Results

Arrays = tuple[np.ndarray, np.ndarray]
KEY = ("task", "method", "model", "lr", "epochs", "samples", "rounds")
COLUMNS = (*KEY, "devices", "accuracy", "kept")
DEVICES, CLASSES, HELD, FEW_ROUNDS, ROUNDS = 8, 6, 60, 15, 40
RATES, EPOCHS, BATCH = (0.01, 0.03, 0.1), (5, 10, 25, 50), 32
USUAL_RATE, USUAL_EPOCHS = 0.03, 10


def spectrograms(rng: np.random.Generator, y: np.ndarray) -> np.ndarray:
    """Return images (N, 16, 16, 1): a tone that rises, falls or bends in time, at a random pitch, in noise."""
    time = np.linspace(0, 1, 16)
    courses = np.stack([6 * time, -6 * time, 0 * time, 5 * np.sin(6 * time), 8 * (time - 0.5) ** 2 * 4, 5 * (time > 0.5)])
    pitch = courses[y] + rng.uniform(4, 10, (len(y), 1))
    image = np.exp(-((np.arange(16)[None, :, None] - pitch[:, None, :]) ** 2) / 2)
    noisy: np.ndarray = image + 0.4 * rng.normal(size=image.shape)
    return noisy[..., None].astype("f4")


def figures(rng: np.random.Generator, y: np.ndarray) -> np.ndarray:
    """Return images (N, 12, 12, 1): one of six figures at a random place, in noise."""
    drawn = np.random.default_rng(7).random((CLASSES, 6, 6)) > 0.5
    x = 0.4 * rng.normal(size=(len(y), 12, 12, 1))
    for image, label, (row, column) in zip(x, y, rng.integers(0, 7, (len(y), 2)), strict=True):
        image[row : row + 6, column : column + 6, 0] += drawn[label]
    return x.astype("f4")


def gestures(rng: np.random.Generator, y: np.ndarray) -> np.ndarray:
    """Return series (N, 32, 3): the smooth course of a class, earlier or later, faster or slower, in noise."""
    draw = np.random.default_rng(8)
    height, speed, phase = (draw.uniform(low, high, (CLASSES, 3, 1)) for low, high in ((0.5, 1.5), (3, 12), (0, 6)))
    time = np.linspace(0, 1, 32) * rng.uniform(0.8, 1.2, (len(y), 1)) + rng.uniform(-0.15, 0.15, (len(y), 1))
    x = height[y] * np.sin(speed[y] * time[:, None, :] + phase[y])
    noisy: np.ndarray = x + 0.5 * rng.normal(size=x.shape)
    return np.moveaxis(noisy, 1, 2).astype("f4")


def vibrations(rng: np.random.Generator, y: np.ndarray) -> np.ndarray:
    """Return series (N, 48, 2): a tone whose frequency is the class's, with any phase, in noise."""
    time = np.linspace(0, 1, 48)[:, None]
    tone = np.sin(2 * np.pi * (2 + 1.5 * y[:, None, None]) * time + rng.uniform(0, 6.3, (len(y), 1, 2)))
    noisy: np.ndarray = tone + 0.5 * rng.normal(size=tone.shape)
    return noisy.astype("f4")


def of_table(load: Callable[..., Any]) -> Callable[[np.random.Generator, int], Arrays]:
    """Return a function that draws N rows of a table of scikit-learn, and their classes."""

    def draw(rng: np.random.Generator, count: int) -> Arrays:
        x, y = load(return_X_y=True)
        taken = rng.permutation(len(y))[:count]
        return ((x - x.mean(0)) / x.std(0))[taken].astype("f4"), y[taken]  # one scale, as in a schema

    return draw


def drawn(make: Callable[[np.random.Generator, np.ndarray], np.ndarray]) -> Callable[[np.random.Generator, int], Arrays]:
    """Return a function that draws N samples of a drawn task, and their classes."""

    def draw(rng: np.random.Generator, count: int) -> Arrays:
        y = rng.integers(0, CLASSES, count)
        return make(rng, y), y

    return draw


IMAGES, SERIES, TABLES = (
    ("vit", "convnet", "dnn", "mlr"),
    ("transformer", "convnet", "dnn", "mlr"),
    ("dnn", "transformer", "mlr"),
)
TASKS: dict[str, tuple[Callable[[np.random.Generator, int], Arrays], tuple[str, ...]]] = {
    "spectrograms": (drawn(spectrograms), IMAGES),
    "figures": (drawn(figures), IMAGES),
    "gestures": (drawn(gestures), SERIES),
    "vibrations": (drawn(vibrations), SERIES),
    "breast cancer": (of_table(load_breast_cancer), TABLES),
    "wine": (of_table(load_wine), TABLES),
}


def devices(task: str, samples: int) -> dict[str, tuple[np.ndarray, ...]]:
    """Return the data of each device: (train_x, train_y, held_x, held_y), with `samples` for training at most."""
    rng = np.random.default_rng(list(TASKS).index(task))
    x, y = TASKS[task][0](rng, DEVICES * (samples + HELD))
    shares = rng.dirichlet([0.5] * DEVICES, int(y.max()) + 1)  # (classes, devices)
    owner = np.array([rng.choice(DEVICES, p=shares[label]) for label in y])
    made: dict[str, tuple[np.ndarray, ...]] = {}
    for device in range(DEVICES):
        mine = np.flatnonzero(owner == device)
        train = mine[: max(2, min(samples, len(mine) // 2))]
        held = mine[len(train) :][:HELD]
        if len(held) >= 4 and len(train) >= 4:
            made[f"device{device}"] = (x[train], y[train], x[held], y[held])
    return made


def wanted() -> Iterator[dict[str, Any]]:
    """Yield what is run: every rate for every model; the default models with all rounds; and every number of epochs."""
    few = {"method": "fedavg", "lr": USUAL_RATE, "epochs": USUAL_EPOCHS, "samples": 40, "rounds": FEW_ROUNDS}
    usual = {task: "convnet" if models is IMAGES else "dnn" for task, (_, models) in TASKS.items()}
    for task, (_, models) in TASKS.items():
        for model, lr in product(models, RATES):
            yield few | {"task": task, "model": model, "lr": lr}
    for task, lr in product(TASKS, RATES[1:]):
        yield few | {"task": task, "model": usual[task], "lr": lr, "rounds": ROUNDS}
    for task, samples, epochs in product(TASKS, (20, 80), EPOCHS):
        yield few | {"task": task, "model": usual[task], "epochs": epochs, "samples": samples}


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(out: Path) -> None:
    """Run what is missing in the file."""
    results = Results(out, COLUMNS)
    there = {tuple(row[name] for name in KEY) for row in results.rows()}
    for key in wanted():
        if tuple(str(key[name]) for name in KEY) in there:
            continue
        settings = {"train.lr": key["lr"], "train.local_epochs": key["epochs"], "train.batch_size": BATCH}
        data = devices(key["task"], key["samples"])
        table = simulate(
            data, key["method"], key["model"], key["rounds"], 0, settings, "none", executor="stacked", progress=False
        ).table()  # fmt: skip
        row = {name: round(table.mean(name) or 0.0, 4) for name in ("accuracy", "kept")}
        results.add([{**key, "devices": len(data), **row}])
        click.echo({**key, **row})


if __name__ == "__main__":
    main()
