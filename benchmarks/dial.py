"""Gain of FedMCSA's dial between the mean and training alone: recipes of unlike and of related devices, with a small network.

`python -m benchmarks.dial --out benchmarks/results/dial` writes rows for each point and seed as it ends, and continues where it
was interrupted. `judged` is the accuracy of a device's own model, which the dial makes; `mean` is that of the kept model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import click

from attune.simulation.recipes.catalogue import FEDAVG, LOCAL, MCSA, Recipe, RecipeMethod, get
from attune.simulation.recipes.run import RecipeRow, run

RECIPES = ("label-shift", "relatedness")
BESIDE = RecipeMethod("FedMCSA beside Local", "fedmcsa", {}, "local")
ENTRIES = (RecipeMethod(LOCAL, "local"), RecipeMethod(FEDAVG, "fedavg"), MCSA[0], BESIDE, MCSA[1])
SETTINGS = {"model.name": "dnn", "model.hidden": [50]}


def small(name: str, rounds: int) -> Recipe:
    """Return the recipe with a network of one layer and the methods between the mean and training alone."""
    recipe = get(name)
    return replace(recipe, entries=ENTRIES, rounds=rounds, settings={**recipe.settings, **SETTINGS})


def table(recipe: Recipe, rows: Sequence[RecipeRow]) -> Iterator[str]:
    """Yield a line of Markdown for each point: own model / kept model, means over seeds in %."""
    labels = [entry.label for entry in recipe.entries]
    yield f"| {recipe.axis} | {' | '.join(labels)} |"
    yield "|---" * (len(labels) + 1) + "|"
    for point in recipe.points:
        cells = []
        for label in labels:
            found = [row for row in rows if (row.x, row.method) == (point.x, label)]
            judged = fmean(row.judged for row in found if row.judged is not None)
            cells.append(f"{100 * judged:.1f} / {100 * fmean(row.mean for row in found):.1f}")
        yield f"| {point.x:g} | {' | '.join(cells)} |"


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=20, show_default=True)
@click.option("--seed", "seeds", multiple=True, type=int, help="Only these seeds.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the CSV files.")
def main(rounds: int, seeds: tuple[int, ...], out: Path) -> None:
    """Run both recipes, or what is left of them."""
    for name in RECIPES:
        recipe = small(name, rounds)
        for line in table(recipe, run(recipe, None, out, lambda text: click.echo(text, err=True), seeds)):
            click.echo(line)


if __name__ == "__main__":
    main()
