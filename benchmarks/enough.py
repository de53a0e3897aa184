"""Training enough: the defaults, rounds that end by held-out likelihood, and ten times the rounds, at points of recipes.

`python -m benchmarks.enough --out FILE --data wisdm=PATH --data hospitals=PATH`. Only the data are a recipe's; model, rate,
epochs and rounds are the defaults of `attune.simulate`. Runs that the file has are left out. `--point`
and `--method` run a part. With `--blend` each device keeps its usual blend; without it the method's own models are alone.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import click

from attune.simulation.simulate import simulate
from benchmarks.recipes.catalogue import get
from benchmarks.result_file import Results
from benchmarks.study import named

POINTS: Mapping[str, tuple[str, float]] = {
    "hospitals": ("hospitals", 1),
    "WISDM 50": ("wisdm", 50),
    "digits 20": ("digits", 20),
    "digits 160": ("digits", 160),
    "feature-shift 4": ("feature-shift", 4),
}
METHODS = ("fedavg", "fedper", "fedmcsa", "fedtp")
BUDGETS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "auto": {"round.rounds": "auto"},
    "ten times": {"round.rounds": 400},
}
KEY = ("point", "method", "budget", "seed")
COLUMNS = (*KEY, "model", "epochs", "rounds", "own", "kept", "seconds")


def row_of(shards: Sequence[Path], method: str, settings: Mapping[str, Any], blend: bool) -> dict[str, Any]:
    """Return the figures of a run: mean accuracies over devices of the method's own models, and of what devices keep."""
    began = time.monotonic()
    names = [str(shard) for shard in shards]
    result = simulate(
        names, method, settings=settings, seed=0, baseline="alone" if blend else "none", executor="stacked", progress=False
    )
    table = result.table()
    return {
        "model": result.summary["model"], "epochs": result._plan.train.local_epochs, "rounds": result.status["round"],
        "own": round(table.mean("accuracy") or 0.0, 4), "kept": round(table.mean("kept") or 0.0, 4),
        "seconds": round(time.monotonic() - began),
    }  # fmt: skip


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--data", "files", multiple=True, metavar="NAME=PATH", help="Data of the recipes hospitals and wisdm.")
@click.option("--point", "points", multiple=True, type=click.Choice(list(POINTS)), default=list(POINTS))
@click.option("--method", "methods", multiple=True, type=click.Choice(METHODS), default=METHODS)
@click.option("--budget", "budgets", multiple=True, type=click.Choice(list(BUDGETS)), default=list(BUDGETS))
@click.option("--blend", is_flag=True, help="Weigh fitted models and the closed form beside the method's own model.")
def main(
    out: Path, files: Sequence[str], points: Sequence[str], methods: Sequence[str], budgets: Sequence[str], blend: bool
) -> None:
    """Run what is missing in the file."""
    results, data = Results(out, COLUMNS), {name: str(path) for name, path in named(files).items()}
    settings: dict[str, Any] = {} if blend else {"train.evaluate": False}
    there = {tuple(row[name] for name in KEY) for row in results.rows()}
    for point, method, budget in product(points, methods, budgets):
        key = {"point": point, "method": method, "budget": budget, "seed": 0}
        if tuple(map(str, key.values())) in there:
            continue
        recipe = get(POINTS[point][0])
        [place] = [place for place in recipe.points if place.x == POINTS[point][1]]
        with tempfile.TemporaryDirectory(prefix="attune-enough-") as folder:
            shards = place.write(Path(folder), recipe.load(data.get(recipe.name), 0), 0)
            results.add([row := key | row_of(shards, method, {**settings, **BUDGETS[budget]}, blend)])
        click.echo(row)


if __name__ == "__main__":
    main()
