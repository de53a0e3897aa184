"""Accuracy of methods whose devices train with noise, at several epsilons; `fedavg+ft` fine-tunes without noise.

`python -m benchmarks.private_methods --task TASK` runs what is missing in benchmarks/results/private/TASK.csv, and writes each
row as it ends. The tasks `school` and `wisdm` need `--data`. Settings are chosen on validation parts, by the same grid for all
methods, for each epsilon. What this choice costs in epsilon is not
counted. Features and numbers to predict are divided by public constants. Epsilon = inf is the same training without noise and
without clipping.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import numpy as np

import attune
from attune.common.config import load_settings
from attune.common.errors import FederationFailed
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.read_options import ReadOptions
from attune.simulation.arguments import data_by_name, read_shards
from attune.simulation.grid_search import TrialSettings, best, trials, validation_members
from attune.simulation.partition.datasets import DIGITS, load_source
from attune.simulation.result import SimulationResult
from benchmarks.recipes.catalogue import get
from benchmarks.result_file import Results

Members = Mapping[str, LazyShard]

OUT = Path(__file__).parent / "results" / "private"
EPSILONS = (math.inf, 8.0, 4.0, 2.0)
DELTA = 1e-5
LOOSE = 1e6  # a norm of gradients that is no bound
PERCENTAGES = (3, 4)  # columns of School
WORST = -1e9  # score of a run that has diverged
LOCAL = "local"
SCORE = "score"  # of the method's own models
COLUMNS = ("task", "epsilon", "method", "seed", "settings", "part", SCORE)
KEY = COLUMNS[:6]
ALTERNATIVES: Mapping[str, Sequence[TrialSettings]] = {
    "fedavg+ft": (("method.tune_epochs=20",),),
    "mr-mtl": (("method.mu=0.1",), ("method.mu=1",), ("method.mu=3",)),
    "fedmcsa": (("method.sigma=1",), ("method.sigma=5",), ("method.sigma=50",)),
}


@dataclass(frozen=True)
class Task:
    """Data set with its devices, a model, and the training settings that all methods have to choose from.

    Attributes:
        cut: Writes the devices' shards of a seed into a folder, from the file of --data.
        squared_error: The table has the mean squared error over all test samples, and not the accuracy, mean over devices.
    """

    cut: Callable[[Path | None, int, Path], None]
    model: str
    methods: tuple[str, ...]
    rounds: int
    seeds: tuple[int, ...]
    rates: tuple[float, ...]
    epochs: tuple[int, ...]
    clips: tuple[float, ...]
    batch: int
    trial_seeds: tuple[int, ...] = (0,)
    squared_error: bool = False

    def listed(self, method: str, epsilon: float) -> list[TrialSettings]:
        """Return the trials of a method. Without noise there is no clipping to choose."""
        clips = self.clips if math.isfinite(epsilon) else (LOOSE,)
        train = [
            (f"train.lr={rate:g}", f"train.local_epochs={epochs}", f"privacy.clip={clip:g}")
            for rate, epochs, clip in product(self.rates, self.epochs, clips)
        ]
        return trials(method, train, ALTERNATIVES.get(method, [()]))


def cut_digits(data: Path | None, seed: int, folder: Path) -> None:
    """Write ten devices with classes by Dirichlet 0.3 and at most 60 training samples each."""
    [point] = [point for point in get("label-shift").points if point.x == 0.3]
    point.write(folder, load_source(DIGITS, seed), seed)


def cut_wisdm(data: Path | None, seed: int, folder: Path) -> None:
    """Write a device for each person, with all windows. A peak that is missing becomes 0."""
    recipe = get("wisdm")
    with tempfile.TemporaryDirectory(prefix="attune-wisdm-") as scratch:
        with np.load(_given(data)) as file:
            arrays = dict(file)
        scaled = np.nan_to_num(arrays["x"]) / [largest_of(str(name)) for name in arrays["columns"]]
        path = Path(scratch) / "wisdm.npz"
        np.savez(path, **{**arrays, "x": scaled.astype(np.float32)})
        source = load_source(str(path), seed, ReadOptions.of(apart=recipe.read["apart"]))
        recipe.points[-1].write(folder, source, seed)


def largest_of(column: str) -> float:
    """Return the public constant that divides a column of WISDM."""
    if column[1:].isdigit():
        return 1.0  # the share of the readings in one of ten bins
    return 10_000.0 if column.endswith("PEAK") else 20.0  # milliseconds in a window; the sensor's range in m/s^2


def cut_school(data: Path | None, seed: int, folder: Path) -> None:
    """Write a device for each school. A fifth of its pupils, drawn at random, is its test part. Scores are divided by 69."""
    with np.load(_given(data)) as file:
        arrays = dict(file)
    x = arrays["x"] / np.where(np.isin(np.arange(arrays["x"].shape[1]), PERCENTAGES), 100, 1)
    for school in np.unique(arrays["school"]).tolist():
        places = np.random.default_rng([seed, school]).permutation(np.flatnonzero(arrays["school"] == school))
        made = folder / f"school{school}"
        made.mkdir(parents=True)
        (made / "meta.json").write_text('{"task": "regression"}', encoding="utf-8")
        for part, kept in zip(("test", "train"), np.split(places, [len(places) // 5]), strict=True):
            np.savez(made / f"{part}.npz", x=x[kept].astype(np.float32), y=(arrays["y"][kept] / 69).astype(np.float32))


def _given(data: Path | None) -> Path:
    if data is None:
        raise click.UsageError("this task needs --data")
    return data


LINEAR = (LOCAL, "fedavg", "fedavg+ft", "mr-mtl", "fedmcsa")  # fedper keeps the head, which is all of a linear model
DEEP = (LOCAL, "fedavg", "fedavg+ft", "fedper", "mr-mtl", "fedmcsa")
DIGITS_SEEDS = (0, 1, 2, 3, 4)
TASKS: Mapping[str, Task] = {
    "digits-linear": Task(cut_digits, "mlr", LINEAR, 15, DIGITS_SEEDS, (0.1, 0.3, 1.0), (1, 4), (0.5, 2.0), 32, (0, 1)),
    "school": Task(cut_school, "mlr", LINEAR, 10, (0, 1, 2), (0.003, 0.01, 0.03), (10,), (0.5, 2.0), 1000, squared_error=True),
    "wisdm": Task(cut_wisdm, "mlr", LINEAR, 15, (0, 1, 2), (0.1, 0.3, 1.0), (4,), (0.5, 2.0), 1000),
    "digits-dnn": Task(cut_digits, "dnn", DEEP, 15, DIGITS_SEEDS, (0.1, 0.3, 1.0), (1, 4), (0.5, 2.0), 32),
}


def score_of(result: SimulationResult, squared_error: bool) -> float:
    """Return the score of the devices' own models, larger is better; WORST after divergence."""
    tested = {client["name"]: client["test_samples"] for client in result.status["clients"] if client["test_samples"]}
    rows = [row for row in result.table() if row.device in tested]
    weights = [tested[row.device] if squared_error else 1 for row in rows]
    mean = float(np.average([math.nan if row.accuracy is None else row.accuracy for row in rows], weights=weights))
    return round(mean - 1 if squared_error else mean, 5) if math.isfinite(mean) else WORST


def run(task: Task, method: str, epsilon: float, seed: int, members: Members, chosen: Iterable[str]) -> float:
    """Train and return the score, as `score_of`. The noise is drawn from the seed, so that a row can be repeated."""
    privacy: dict[str, Any] = {"unit": "example", "delta": DELTA, "ranges": [[-1, 1]], "insecure_seed": seed}
    privacy |= {"epsilon": epsilon} if math.isfinite(epsilon) else {"noise": 0.0}
    settings = load_settings(None, ["train.evaluate=false", *chosen, f"train.batch_size={task.batch}"], {})
    settings["privacy"] = settings.pop("privacy") | privacy
    try:
        result = attune.simulate(
            members, method, task.model, task.rounds, seed, settings, baseline="none", executor="stacked", progress=False
        )
    except FederationFailed:  # all devices diverged
        return WORST
    return score_of(result, task.squared_error)


class Table:
    """Rows of one task, which are computed when they are missing."""

    def __init__(self, results: Results, name: str) -> None:
        self._results, self._name, self._task = results, name, TASKS[name]

    def __repr__(self) -> str:
        return f"Table({self._name})"

    def row(self, method: str, epsilon: float, seed: int, part: str, members: Members, settings: TrialSettings) -> float:
        """Return the score of one run."""
        key = dict(zip(KEY, (self._name, f"{epsilon:g}", method, str(seed), " ".join(settings), part), strict=True))
        for row in self._results.rows():
            if key.items() <= row.items():
                return float(row[SCORE])
        score = run(self._task, method, epsilon, seed, members, settings)
        self._results.add([{**key, SCORE: score}])
        return score

    def fill(self, epsilon: float, members: Mapping[int, Members]) -> None:
        """Choose settings for this epsilon on validation parts, and run them on the test parts."""
        task = self._task
        held = {seed: validation_members(members[seed], seed) for seed in task.trial_seeds}
        for method in task.methods:
            tried = {
                settings: [self.row(method, epsilon, seed, "validation", part, settings) for seed, part in held.items()]
                for settings in task.listed(method, epsilon)
            }
            chosen = best({settings: fmean(scores) for settings, scores in tried.items()})
            ended = [self.row(method, epsilon, seed, "test", members[seed], chosen) for seed in task.seeds]
            click.echo(f"{self._name} epsilon {epsilon:g} {method}: {fmean(ended):.4f} {' '.join(chosen)}")


@click.command()
@click.option("--task", "name", type=click.Choice(list(TASKS)), required=True)
@click.option("--data", type=click.Path(path_type=Path, exists=True), help="school.npz or wisdm.npz")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=OUT, help="Folder of the tables.")
@click.option("--epsilon", "epsilons", type=float, multiple=True, default=EPSILONS, show_default=True)
def main(name: str, data: Path | None, out: Path, epsilons: tuple[float, ...]) -> None:
    """Run what is left of a task."""
    out.mkdir(parents=True, exist_ok=True)
    task, table = TASKS[name], Table(Results(out / f"{name}.csv", COLUMNS), name)
    with tempfile.TemporaryDirectory(prefix="attune-private-") as folder:
        members: dict[int, Members] = {}
        for seed in sorted({*task.seeds, *task.trial_seeds}):
            task.cut(data, seed, Path(folder) / str(seed))
            members[seed] = read_shards(data_by_name(f"{folder}/{seed}/*"))
        for epsilon in epsilons:
            table.fill(epsilon, members)


if __name__ == "__main__":
    main()
