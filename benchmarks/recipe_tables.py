"""docs/choosing.md's tables, written from the rows of `fedserver simulate --benchmark` by `python -m benchmarks.report`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from attune.simulation.recipes.catalogue import RECIPES
from attune.simulation.recipes.picture import crossover, gains
from attune.simulation.recipes.recipe import LOCAL, TUNED, Recipe
from attune.simulation.recipes.run import Row, read, shown

OUT = Path(__file__).parent / "results" / "recipes"


def sections(folder: Path = OUT) -> Iterator[str]:
    """The lines of all recipes: those that were run with their tables, the others with their commands."""
    rows = {name: read(folder / f"{name}.csv") for name in RECIPES}
    for name, recipe in RECIPES.items():
        if rows[name]:
            yield from _recipe(recipe, rows[name])
    yield "### Who is harmed"
    yield ""
    yield from _harmed(rows)
    left = [f"`{command(recipe)}`" for name, recipe in RECIPES.items() if not whole(recipe, rows[name])]
    if left:
        yield ""
        yield f"Not run, or not to the end: {', '.join(left)}."


def whole(recipe: Recipe, rows: Sequence[Row]) -> bool:
    return len(rows) == len(recipe.points) * len(recipe.entries) * len(recipe.seeds)


def command(recipe: Recipe) -> str:
    data = f" --data {recipe.data}" if recipe.data else ""
    return f"fedserver simulate --benchmark {recipe.name}{data}"


def _recipe(recipe: Recipe, rows: Sequence[Row]) -> Iterator[str]:
    yield f"### {recipe.title}"
    yield ""
    seeds = f"{len({row.seed for row in rows})} of {len(recipe.seeds)} seeds"
    yield f"`{command(recipe)}`, {recipe.rounds} rounds, {seeds}. Mean accuracy over"
    yield f"devices in % (in brackets the worst device's); x: {recipe.axis}."
    yield ""
    labels = [entry.label for entry in recipe.entries]
    for series, found in shown(recipe, rows).items():
        if series:
            yield f"**{series}**"
            yield ""
        yield f"| x | constant answer | {' | '.join(labels)} |"
        yield "|---" * (len(labels) + 2) + "|"
        for x in dict.fromkeys(row["x"] for row in found):
            here = {row["method"]: row for row in found if row["x"] == x}
            cells = [f"{100 * here[each]['mean']:.1f} ({100 * here[each]['worst']:.0f})" for each in labels]
            yield f"| {x:g} | {100 * here[LOCAL]['constant']:.1f} | {' | '.join(cells)} |"
        yield ""
        yield from _served(found, labels)
        yield from _ends(recipe, found, labels)


def _served(found: Sequence[dict[str, object]], labels: Sequence[str]) -> Iterator[str]:
    """What is served without training on the device, and how much is sent, at the first point."""
    x = found[0]["x"]
    here = {row["method"]: row for row in found if row["x"] == x}
    said = [f"{each} {100 * served:.1f}" for each in labels if isinstance(served := here[each]["served"], float)]
    sent = [f"{each} {moved / 1e6:.2f}" for each in labels if isinstance(moved := here[each]["bytes"], float) and moved]
    yield f"Served without any training on the device, at {x}: {', '.join(said)}."
    yield f"MB that a device sends and receives in all rounds: {', '.join(sent)}."
    yield ""


def _ends(recipe: Recipe, found: Sequence[dict[str, object]], labels: Sequence[str]) -> Iterator[str]:
    said = []
    for over in (LOCAL, TUNED):
        for each in labels:
            x = crossover(gains(found, each, over), recipe.log) if each != over else None
            said += [f"{each} over {over} at about {float(f'{x:.2g}'):g}"] if x is not None else []
    if said:
        yield f"Gains that end within this range: {'; '.join(said)}."
        yield ""


def _harmed(rows: dict[str, list[Row]]) -> Iterator[str]:
    """The share of devices worse off than alone or with FedAvg, over all points of each recipe."""
    labels = list(dict.fromkeys(entry.label for recipe in RECIPES.values() for entry in recipe.entries))
    yield f"| recipe | {' | '.join(labels)} |"
    yield "|---" * (len(labels) + 1) + "|"
    for name, found in rows.items():
        shares = {each: [row.harmed for row in found if row.method == each] for each in labels}
        if found:
            yield f"| {name} | {' | '.join(f'{100 * fmean(each):.1f} %' if each else '' for each in shares.values())} |"
