"""Reference figures: settings chosen for every method by an equal grid on validation parts, then runs on the test parts.

`python -m benchmarks.study benchmarks/studies/NAME.toml --data PATH --out benchmarks/results --scratch SHARDS`. Every run is a
real federation, a server and a hosted fleet over mutual TLS; with `--in-process` it is simulated. A row is written as each
one ends, and an interrupted study continues.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from attune.common.config import CountOrZero, convert, read_toml
from attune.fedclient.data.shard import load_shard
from attune.simulation.grid_search import validation_places
from benchmarks.federation import CLIENT_COLUMNS, Ended, Home, client_rows, federation, simulated
from benchmarks.grid import Grid, alternatives, chosen
from benchmarks.result_file import Results
from benchmarks.rows import COLUMNS, TRIAL, figures, trial_figures

KEY = ("task", "method", "seed", "settings", "rounds")
GRID_COLUMNS = (*KEY, *TRIAL)
DATA = "data"  # name of the file of --data without a name


class Task(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shards as `fedclient partition` makes them, once for each seed."""

    name: str
    partition: list[str]  # flags of `fedclient partition`; --seed, --out and, for a file, --dataset are added
    seeds: tuple[int, ...] = (0,)
    set: list[str] = []  # settings of every method
    samples: CountOrZero | None = None  # as in Study, for this task
    data: str = DATA  # name of a file of --data; the task needs no file if none has this name


class Study(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file in benchmarks/studies."""

    methods: list[str]
    rounds: CountOrZero  # 0: only the trials of the grid
    task: list[Task]
    grid: Grid | None = None
    set: list[str] = []
    own: dict[str, list[str]] = {}  # settings of each method, if there is no grid
    samples: CountOrZero = 0  # number of training samples that are drawn from the data set, and of test samples; 0: all
    baseline: bool = False


@dataclass(frozen=True)
class Run:
    """One federation that is to run."""

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


def missing(results: Results, runs: Iterable[Run]) -> list[Run]:
    """Return the runs that the table does not have yet."""
    known = {tuple(row[name] for name in KEY) for row in results.rows()}
    return [run for run in runs if tuple(str(value) for value in run.key.values()) not in known]


def named(given: Iterable[str]) -> dict[str, Path]:
    """Parse `PATH` or `NAME=PATH` of --data.

    Raises:
        BadParameter: The file does not exist.
    """
    found = {}
    for text in given:
        name, equals, path = text.partition("=")
        found[name if equals else DATA] = Path(path if equals else text)
    if missing := [str(path) for path in found.values() if not path.exists()]:
        raise click.BadParameter(f"no such file: {', '.join(missing)}")
    return found


def shortened(data: Path, samples: int, seed: int, out: Path) -> Path:
    """Write an .npz with `samples` samples of the training and of the test part, drawn at random, in their order."""
    with np.load(data) as arrays:
        parts = {"train": len(arrays["train_y"]), "test": len(arrays["test_y"])}
        rng = np.random.default_rng(seed)
        drawn = {part: np.sort(rng.permutation(size)[:samples]) for part, size in parts.items()}
        np.savez(out, **{name: arrays[name][drawn[name.partition("_")[0]]] for name in arrays.files})
    return out


def cut(study: Study, task: Task, seed: int, files: Mapping[str, Path], folder: Path) -> Path:
    """Cut the task's shards."""
    out, data = folder / f"{task.name}-{seed}", files.get(task.data)
    if not out.exists():
        dataset: tuple[object, ...] = ()
        if data is not None and "--dataset" not in task.partition:
            short = folder / f"{task.name}-{seed}.npz"
            samples = study.samples if task.samples is None else task.samples
            dataset = ("--dataset", shortened(data, samples, seed, short) if samples else data)
        Home(folder).run("fedclient", "partition", *dataset, *task.partition, "--seed", seed, "--out", out)
    return out


def validation(shards: Path, share: float, seed: int) -> Path:
    """Make the same shards with a share of the training parts as test parts. The real test parts are left out."""
    out = shards.with_name(f"{shards.name}-validation")
    for folder in sorted(path.parent for path in shards.glob("*/train.npz")):
        made = out / folder.name
        made.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "meta.json", made)
        parts = validation_places(load_shard(folder), share, seed)
        with np.load(folder / "train.npz") as file:
            arrays = dict(file)
        for part, places in zip(("train", "test"), parts, strict=True):
            np.savez(made / f"{part}.npz", **{name: array[places] for name, array in arrays.items()})
    return out


Carry = Callable[[Study, Run, bool], Ended]  # runs a federation, with or without the local baseline


def over_the_network(study: Study, run: Run, baseline: bool) -> Ended:
    """Run the federation over the network: a server and a hosted fleet in processes of their own."""
    settings = (*study.set, *run.task.set, *run.settings)
    flags = ["--rounds", str(run.rounds), "--seed", str(run.seed), *(word for each in settings for word in ("--set", each))]
    return federation(run.method, run.shards, flags, baseline)


def in_this_process(study: Study, run: Run, baseline: bool) -> Ended:
    """Run the federation with `attune.simulate`."""
    return simulated(run.method, run.shards, (*study.set, *run.task.set, *run.settings), run.rounds, run.seed, baseline)


def trial_runs(study: Study, grid: Grid, files: Mapping[str, Path], scratch: Path) -> list[Run]:
    """Return all trials, which run on validation parts."""
    runs = []
    for task in study.task:
        shards = validation(cut(study, task, grid.seed, files, scratch), grid.share, grid.seed)
        for method in study.methods:
            runs += [Run(task, method, grid.seed, each, grid.rounds, shards) for each in alternatives(grid, method)]
    return runs


def final_runs(study: Study, trials: Sequence[dict[str, str]], files: Mapping[str, Path], scratch: Path) -> list[Run]:
    """Return the final runs: every method on every draw of every task, with its chosen settings."""
    runs = []
    for task in study.task:
        for seed in task.seeds:
            shards = cut(study, task, seed, files, scratch)
            for method in study.methods:
                if study.grid is None:
                    settings = tuple(study.own.get(method, ()))
                else:
                    settings = chosen(trials, study.grid, task.name, method)
                runs.append(Run(task, method, seed, settings, study.rounds, shards))
    return runs


def all_of(runs: Sequence[Run], jobs: int, do: Callable[[Run], None]) -> None:
    """Carry out the runs, `jobs` at a time, and print how each ended. A run that fails does not end the others."""

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
@click.option("--data", multiple=True, metavar="[NAME=]PATH", help="A data set, by its name in the tasks.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the tables.")
@click.option("--scratch", type=click.Path(path_type=Path), required=True, help="Folder for shards.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Federations at a time.")
@click.option("--in-process", is_flag=True, help="Simulate in this process, which is faster. One job.")
def main(file: Path, data: tuple[str, ...], out: Path, scratch: Path, jobs: int, in_process: bool) -> None:
    """Run the study in FILE, or what is left of it."""
    if in_process and jobs > 1:
        raise click.BadParameter("--in-process goes with --jobs 1")
    study, files = convert(Study, read_toml(file), ""), named(data)
    scratch.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    trials = Results(out / f"{file.stem}_grid.csv", GRID_COLUMNS)
    results = Results(out / f"{file.stem}.csv", COLUMNS)
    clients = Results(out / f"{file.stem}_clients.csv", ("task", *CLIENT_COLUMNS))

    carry: Carry = in_this_process if in_process else over_the_network

    def tried(run: Run) -> None:
        ended = carry(study, run, False)
        trials.add([run.key | trial_figures(ended)])

    def measured(run: Run) -> None:
        ended = carry(study, run, study.baseline)
        results.add([run.key | figures(ended)])
        clients.add({"task": run.task.name, "seed": run.seed} | row for row in client_rows(ended.status))

    if study.grid is not None:
        all_of(missing(trials, trial_runs(study, study.grid, files, scratch)), jobs, tried)
    if study.rounds:
        all_of(missing(results, final_runs(study, trials.rows(), files, scratch)), jobs, measured)


if __name__ == "__main__":
    main()
