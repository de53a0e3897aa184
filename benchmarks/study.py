"""Reference figures: settings chosen for every method by the same grid on validation parts, then runs on the test parts.

`python -m benchmarks.study benchmarks/studies/NAME.toml --data PATH --out benchmarks/results --scratch SHARDS`. Every run is a
real federation: a server and a hosted fleet over mutual TLS. A row is written as each one ends, and a study that was
interrupted goes on.
"""

from __future__ import annotations

import csv
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from attune.common.config import Count, CountOrZero, convert, read_toml
from attune.fedclient.data.holdout import hold_out
from attune.fedclient.data.shard import load_shard
from benchmarks.federation import CLIENT_COLUMNS, Ended, Home, client_rows, federation, table
from benchmarks.rows import COLUMNS, TRIAL, figures, trial_figures

EVERY_METHOD = "*"
KEY = ("task", "method", "seed", "settings", "rounds")
GRID_COLUMNS = (*KEY, *TRIAL)


class Task(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shards as `fedclient partition` makes them, once for each seed."""

    name: str
    partition: list[str]  # flags; --seed and --out are added, and --dataset if a file is given and it is not among them
    seeds: tuple[int, ...] = (0,)
    set: list[str] = []  # settings of every method
    settings_of: str = ""  # another task whose choice is taken over, instead of a grid of its own


class Grid(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Trials of each method: every learning rate with every one of its own alternatives, which are lists of settings."""

    rounds: Count
    seed: int
    lr: list[float]
    own: dict[str, list[list[str]]] = {}  # as many alternatives for every method; none: the learning rates alone
    share: float = 0.25  # of each client's training samples, for validation


class Study(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file in benchmarks/studies."""

    methods: list[str]
    rounds: Count
    task: list[Task]
    grid: Grid | None = None
    set: list[str] = []
    samples: CountOrZero = 0  # training samples drawn from the data set, and as many for testing; 0: all
    baseline: bool = False


@dataclass(frozen=True)
class Run:
    """One federation to be."""

    task: Task
    method: str
    seed: int
    settings: tuple[str, ...]
    rounds: int
    shards: Path

    @property
    def key(self) -> dict[str, Any]:
        named = {"task": self.task.name, "method": self.method, "seed": self.seed}
        return named | {"settings": " ".join(self.settings), "rounds": self.rounds}


class Results:
    """A table that knows which runs it has. Rows may be written from several threads."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._path, self._columns, self._lock = path, columns, threading.Lock()

    def __repr__(self) -> str:
        return f"Results({self._path})"

    def rows(self) -> list[dict[str, str]]:
        if not self._path.exists():
            return []
        with self._path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def missing(self, runs: Iterable[Run]) -> list[Run]:
        known = {tuple(row[name] for name in KEY) for row in self.rows()}
        return [run for run in runs if tuple(str(value) for value in run.key.values()) not in known]

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        with self._lock, table(self._path, self._columns, append=True) as write:
            for row in rows:
                write(row)


def shortened(data: Path, samples: int, seed: int, out: Path) -> Path:
    """An .npz with so many samples of the training and of the test part, drawn at random, in their order."""
    with np.load(data) as arrays:
        parts = {"train": len(arrays["train_y"]), "test": len(arrays["test_y"])}
        rng = np.random.default_rng(seed)
        drawn = {part: np.sort(rng.permutation(size)[:samples]) for part, size in parts.items()}
        np.savez(out, **{name: arrays[name][drawn[name.partition("_")[0]]] for name in arrays.files})
    return out


def cut(study: Study, task: Task, seed: int, data: Path | None, folder: Path) -> Path:
    """The task's shards."""
    out = folder / f"{task.name}-{seed}"
    if not out.exists():
        dataset: tuple[object, ...] = ()
        if data is not None and "--dataset" not in task.partition:
            short = folder / f"{task.name}-{seed}.npz"
            dataset = ("--dataset", shortened(data, study.samples, seed, short) if study.samples else data)
        Home(folder).run("fedclient", "partition", *dataset, *task.partition, "--seed", seed, "--out", out)
    return out


def validation(shards: Path, share: float, seed: int) -> Path:
    """The same shards, but their test parts are a share of the training parts: the real test parts are left out."""
    out = shards.with_name(f"{shards.name}-validation")
    for folder in sorted(path.parent for path in shards.glob("*/train.npz")):
        made = out / folder.name
        made.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "meta.json", made)
        shard = load_shard(folder)
        with np.load(folder / "train.npz") as file:
            arrays = dict(file)
        parts = hold_out(arrays["y"], share, seed, shard.kind, shard.groups)
        for part, places in zip(("train", "test"), parts, strict=True):
            np.savez(made / f"{part}.npz", **{name: array[places] for name, array in arrays.items()})
    return out


def alternatives(grid: Grid, method: str) -> list[tuple[str, ...]]:
    """The settings of each trial of a method."""
    own = grid.own.get(method, grid.own.get(EVERY_METHOD, [[]]))
    return [(f"train.lr={lr:g}", *settings) for lr, settings in product(grid.lr, own)]


def chosen(rows: Iterable[dict[str, str]], task: str, method: str) -> tuple[str, ...]:
    """The settings with the best validation accuracy; of equal ones the first in the file's order of learning rates."""
    own = [row for row in rows if (row["task"], row["method"]) == (task, method)]
    best = max(own, key=lambda row: (float(row["validation_accuracy"]), -float(row["settings"].split()[0].partition("=")[2])))
    return tuple(best["settings"].split())


def carry_out(study: Study, run: Run, baseline: bool = False) -> Ended:
    settings = (*study.set, *run.task.set, *run.settings)
    flags = ["--rounds", str(run.rounds), "--seed", str(run.seed), *(word for each in settings for word in ("--set", each))]
    return federation(run.method, run.shards, flags, baseline)


def trial_runs(study: Study, grid: Grid, data: Path | None, scratch: Path) -> list[Run]:
    """All trials, on validation parts."""
    runs = []
    for task in study.task:
        if task.settings_of:
            continue
        shards = validation(cut(study, task, grid.seed, data, scratch), grid.share, grid.seed)
        for method in study.methods:
            runs += [Run(task, method, grid.seed, each, grid.rounds, shards) for each in alternatives(grid, method)]
    return runs


def final_runs(study: Study, trials: Sequence[dict[str, str]], data: Path | None, scratch: Path) -> list[Run]:
    """Every method on every draw of every task, with what was chosen for it."""
    runs = []
    for task in study.task:
        for seed in task.seeds:
            shards = cut(study, task, seed, data, scratch)
            for method in study.methods:
                settings = chosen(trials, task.settings_of or task.name, method) if study.grid else ()
                runs.append(Run(task, method, seed, settings, study.rounds, shards))
    return runs


def all_of(runs: Sequence[Run], jobs: int, do: Callable[[Run], None]) -> None:
    """Carries runs out, so many at a time, and says how each ended. One that fails does not end the others."""

    def one(run: Run) -> bool:
        try:
            do(run)
        except RuntimeError as error:
            click.echo(f"FAILED {run.key}: {error}", err=True)
            return False
        click.echo(f"done {run.key}")
        return True

    with ThreadPoolExecutor(jobs) as pool:
        ended = list(pool.map(one, runs))
    if not all(ended):
        raise SystemExit(f"{ended.count(False)} of {len(ended)} federations failed; the same command tries them again")


@click.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True))
@click.option("--data", type=click.Path(path_type=Path, exists=True), help="The data set, unless the scheme makes its own.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the tables.")
@click.option("--scratch", type=click.Path(path_type=Path), required=True, help="Folder for shards.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Federations at a time.")
def main(file: Path, data: Path | None, out: Path, scratch: Path, jobs: int) -> None:
    """Runs the study in FILE, or what is left of it."""
    study = convert(Study, read_toml(file), "")
    scratch.mkdir(parents=True, exist_ok=True)
    trials = Results(out / f"{file.stem}_grid.csv", GRID_COLUMNS)
    results = Results(out / f"{file.stem}.csv", COLUMNS)
    clients = Results(out / f"{file.stem}_clients.csv", ("task", *CLIENT_COLUMNS))

    def tried(run: Run) -> None:
        ended = carry_out(study, run)
        trials.add([run.key | trial_figures(ended)])

    def measured(run: Run) -> None:
        ended = carry_out(study, run, study.baseline)
        results.add([run.key | figures(ended)])
        clients.add({"task": run.task.name, "seed": run.seed} | row for row in client_rows(ended.status))

    if study.grid is not None:
        all_of(trials.missing(trial_runs(study, study.grid, data, scratch)), jobs, tried)
    all_of(results.missing(final_runs(study, trials.rows(), data, scratch)), jobs, measured)


if __name__ == "__main__":
    main()
