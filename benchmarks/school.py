"""School: exam scores of 139 schools by a linear model, trained alone, in common, and pulled towards a common model.

`python -m benchmarks.school --data school.npz --out benchmarks/results/school.csv` runs what is missing. A quarter of each
school's pupils, drawn at random, is its test part. The figure is the mean squared error over all test pupils of what schools
keep. Learning rate and strength of the pull are chosen on validation parts, which are cut from the training parts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

import attune
from attune.fedclient.data.lazy_shard import LazyShard
from attune.simulation.arguments import data_by_name, read_shards
from attune.simulation.grid import TrialSettings, best, parse_grid
from attune.simulation.recipes.run import squared_error
from attune.simulation.recipes.site_tables import by_site, read_school
from attune.simulation.validation import validation_members
from benchmarks.result_file import Results

KEY = ("at_most", "method", "seed", "settings", "part")
METHODS = ("local", "fedavg", "mr-mtl")
GRID = ("train.lr=0.005,0.05", "method.mu=1,4")
MOST = (20, 1000)  # training pupils of a school, at most; the largest school has fewer than 1,000
ROUNDS = 15
SETTINGS = {"model.name": "mlr", "train.momentum": 0.9, "train.local_epochs": 5}


def measured(results: Results, key: Mapping[str, Any], members: Mapping[str, LazyShard], settings: Mapping[str, Any]) -> float:
    """Return the error of a run, which is carried out if the table does not have it yet."""
    wanted = {name: str(value) for name, value in key.items()}
    for row in results.rows():
        if wanted.items() <= row.items():
            return float(row["mse"])
    result = attune.simulate(
        members, key["method"], None, ROUNDS, key["seed"], {**SETTINGS, **settings}, executor="stacked", progress=False
    )
    error = round(squared_error(result, {name: member.load() for name, member in members.items()}), 2)
    results.add([{**key, "mse": error}])
    return error


def point(results: Results, members: Mapping[str, LazyShard], at_most: int, seed: int) -> None:
    """Run the trials of each method on validation parts, and the method with the chosen settings on the test parts."""
    held = validation_members(members, seed)
    for method, listed in parse_grid(GRID, METHODS).items():
        key = {"at_most": at_most, "method": method, "seed": seed}
        scores: dict[TrialSettings, float] = {}
        for settings in listed if len(listed) > 1 else ():
            trial = key | {"settings": " ".join(settings), "part": "validation"}
            scores[settings] = -measured(results, trial, held, _values(settings))
        chosen = best(scores) if scores else listed[0]
        run = key | {"settings": " ".join(chosen), "part": "test"}
        click.echo(f"{run}: {measured(results, run, members, _values(chosen))}")


def _values(settings: TrialSettings) -> dict[str, float]:
    return {key: float(value) for key, _, value in (text.partition("=") for text in settings)}


@click.command()
@click.option("--data", type=click.Path(path_type=Path, exists=True), required=True, help="school.npz")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="A CSV file.")
@click.option("--seed", "seeds", type=int, multiple=True, default=(0, 1, 2), show_default=True)
def main(data: Path, out: Path, seeds: tuple[int, ...]) -> None:
    """Run what is left."""
    results = Results(out, (*KEY, "mse"))
    tables = read_school(data)
    for seed in seeds:
        for at_most in MOST:
            with tempfile.TemporaryDirectory(prefix="attune-school-") as folder:
                by_site(tables, seed, at_most).write(Path(folder))
                point(results, read_shards(data_by_name(f"{folder}/*")), at_most, seed)


if __name__ == "__main__":
    main()
