"""Rivals beside Attune's methods: what each device has with scikit-learn alone, on the shards of a recipe or of a project.

`python -m benchmarks.rivals --recipe digits --seed 0 --out benchmarks/results/rivals.csv` fits what is missing in the file, and
prints it beside the committed rows of the recipe. `--shards 'sites/*' --name mine` fits them on a project's shards.
benchmarks/rival_models.py has the models, and how a device chooses. Text, and with it the recipe `roles`, has no rival.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import numpy as np

from attune.common.errors import AttuneError
from attune.common.text import aligned
from attune.fedclient import shards as shard_paths
from benchmarks.recipes.catalogue import RECIPES, get
from benchmarks.result_file import Results
from benchmarks.rival_models import CHOSEN, RivalResult, rival_results

KEY = ("recipe", "series", "x", "seed")
COLUMNS = (*KEY, "rival", "mean", "pooled", "devices", "seconds", "mse")
RECIPE_SEEDS, PROJECT_SEEDS = (0, 1, 2, 3, 4), (0,)
RECIPE_RESULTS = Path(__file__).parent / "results" / "recipes"
Place = tuple[str, float]  # the series and x of a point


def rows_of(key: Mapping[str, Any], devices: Mapping[str, Mapping[str, RivalResult]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each rival, over the devices that have it: all, but for gradient boosting.

    Args:
        key: The recipe, the point and the seed.
        devices: By device and rival, what `rival_results` returns.
    """
    for rival in dict.fromkeys(name for by_rival in devices.values() for name in by_rival if name != CHOSEN) | {CHOSEN: None}:
        results = [by_rival[rival] for by_rival in devices.values() if rival in by_rival]
        squared = [result.squared_n for result in results if result.squared_n is not None]
        yield {
            **key,
            "rival": rival,
            "mean": round(fmean(result.mean for result in results), 4),
            "pooled": round(float(np.concatenate([result.score_n for result in results]).mean()), 4),
            "devices": len(results),
            "seconds": round(sum(result.seconds for result in results), 1),
            "mse": float(f"{np.concatenate(squared).mean():.5g}") if squared else None,
        }


def fit(results: Results, key: Mapping[str, Any], shards: Sequence[Path], seed: int) -> None:
    """Fit the rivals on the shards, and add their rows to the file."""
    results.add(list(rows_of(key, rival_results(shards, seed))))


def is_there(results: Results, key: Mapping[str, Any]) -> bool:
    """Return whether the file has the rows of this point and seed."""
    wanted = {name: str(value) for name, value in key.items()}
    return any(wanted.items() <= row.items() and row["rival"] == CHOSEN for row in results.rows())


def fit_recipe(results: Results, name: str, data: str | None, places: Sequence[float], seeds: Sequence[int]) -> None:
    """Fit the rivals at those points of a recipe that are missing in the file.

    Args:
        results: The file.
        name: The recipe.
        data: Its data set, if it is not bundled.
        places: The x of the points; empty for all.
        seeds: Seeds of the cuts.

    Raises:
        AttuneError: The data cannot be read, or have no rival.
    """
    recipe = get(name)
    for seed in seeds:
        source = recipe.load(data, seed)
        for point in recipe.points:
            key = {"recipe": name, "series": point.series, "x": f"{point.x:g}", "seed": seed}
            if is_there(results, key) or point.x not in (places or [point.x]):
                continue
            with tempfile.TemporaryDirectory(prefix="attune-rivals-") as folder:
                fit(results, key, point.write(Path(folder) / "shards", source, seed), seed=0)


def fit_project(results: Results, name: str, pattern: str, seeds: Sequence[int]) -> None:
    """Fit the rivals on a project's shards, for each seed that is missing in the file. The seed decides what is held out.

    Raises:
        AttuneError: No shard matches the pattern, or the shards cannot be read or have no rival.
    """
    for seed in seeds:
        key = {"recipe": name, "series": "", "x": "", "seed": seed}
        if not is_there(results, key):
            fit(results, key, shard_paths.expand([pattern]), seed)


def lines(rows: Sequence[Mapping[str, str]], name: str, committed: Path = RECIPE_RESULTS) -> Iterator[str]:
    """Yield the rivals of a recipe or a project as a table, and below them the committed rows of its methods.

    Cells are means over devices in %, over the seeds that the line names. Of the committed rows only seeds count that the
    rivals have at that point.

    Args:
        rows: The rows of the file.
        name: The recipe or the project.
        committed: Folder with the committed rows of recipes.
    """
    mine = [row for row in rows if row["recipe"] == name]
    fitted = {(_place(row), row["seed"]) for row in mine}
    named = [(row["rival"], row) for row in mine]
    path = committed / f"{name}.csv"
    if name in RECIPES and path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            named += [(row["method"], row) for row in csv.DictReader(file) if (_place(row), row["seed"]) in fitted]
    places = sorted({_place(row) for row in mine})
    heads = [f"{series} {x:g}".strip() for series, x in places] if name in RECIPES else [name]
    found = [["mean over devices in %", *heads, "seeds"]]
    for label in dict.fromkeys(label for label, _ in named):
        of_label = [row for each, row in named if each == label]
        means = [[100 * float(row["mean"]) for row in of_label if _place(row) == place] for place in places]
        seeds = sorted({int(row["seed"]) for row in of_label})
        found.append([label, *(f"{fmean(cell):.1f}" if cell else "" for cell in means), " ".join(map(str, seeds))])
    yield from aligned(found)


def _place(row: Mapping[str, str]) -> Place:
    return row["series"], float(row["x"] or 0)


@click.command()
@click.option("--recipe", type=click.Choice(list(RECIPES)), help="Fit the rivals on the shards of this recipe.")
@click.option("--data", help="The recipe's data set, if it is not bundled.")
@click.option("--x", "places", multiple=True, type=float, help="Only these points of the recipe.")
@click.option("--shards", "pattern", help="Fit the rivals on these shards: a pattern of folders, in quotes.")
@click.option("--name", default="project", show_default=True, help="What --shards are called in the file.")
@click.option("--seed", "seeds", multiple=True, type=int, help="Default: 0 to 4 for a recipe, 0 for --shards.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="A CSV file.")
def main(
    recipe: str | None, data: str | None, places: tuple[float, ...], pattern: str | None, name: str, seeds: tuple[int, ...],
    out: Path,
) -> None:  # fmt: skip
    """Fit what is left, and print it beside the committed rows."""
    if (recipe is None) == (pattern is None):
        raise click.UsageError("say either --recipe or --shards")
    if pattern is not None and name in RECIPES:
        raise click.UsageError(f"{name} is a recipe: give the shards another --name")
    results = Results(out, COLUMNS)
    try:
        if recipe is not None:
            fit_recipe(results, recipe, data, places, seeds or RECIPE_SEEDS)
        elif pattern is not None:
            fit_project(results, name, pattern, seeds or PROJECT_SEEDS)
    except AttuneError as error:
        raise click.ClickException(str(error)) from None
    for line in lines(results.rows(), recipe or name):
        click.echo(line)


if __name__ == "__main__":
    main()
