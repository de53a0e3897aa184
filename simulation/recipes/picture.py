"""A recipe's rows as text, and as a picture: gain over training alone and over tuned FedAvg, with the crossover."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from attune.common.pictures import figures
from attune.simulation.recipes.recipe import FEDAVG, LOCAL, TUNED, Recipe
from attune.simulation.recipes.run import Row, shown

OVER = (LOCAL, TUNED)
HEADS = ("mean", "pooled", "worst", "harmed", "by group", "served", "constant", "MB", "seeds")
NO_BETTER = "*"  # after the mean of a method that is no better than a constant answer


def lines(recipe: Recipe, rows: Sequence[Row]) -> Iterator[str]:
    """A table for each series, in %."""
    for series, found in shown(recipe, rows).items():
        yield f"{recipe.title}{f' ({series})' if series else ''}, {recipe.rounds} rounds; x: {recipe.axis}"
        yield f"{'x':>6}  {'method':<15}" + "".join(f" {head:>8}" for head in HEADS)
        for row in found:
            shares = [row[name] for name in HEADS[:7]]
            cells = ["-" if each is None else f"{100 * each:.1f}" for each in shares]
            cells[0] += NO_BETTER if no_better(row) else ""
            cells += [f"{row['bytes'] / 1e6:.2f}", str(row["seeds"])]
            yield f"{row['x']:>6g}  {row['method']:<15}" + "".join(f" {cell:>8}" for cell in cells)
        if any(map(no_better, found)):
            yield f"{NO_BETTER} no better than a constant answer"


def no_better(row: Mapping[str, Any]) -> bool:
    """Whether a method's mean is no better than that of constant answers."""
    return bool(row["mean"] <= row["constant"])


def gains(found: Sequence[dict[str, Any]], method: str, over: str) -> list[tuple[float, float]]:
    """(x, points of accuracy) by which a method's mean is above another's, of each point where both are known."""
    means = {(row["x"], row["method"]): 100 * row["mean"] for row in found}
    return [(x, mean - means[x, over]) for (x, name), mean in means.items() if name == method and (x, over) in means]


def crossovers(points: Sequence[tuple[float, float]], log: bool = True) -> list[tuple[float, bool]]:
    """Where a gain crosses 0, on the straight lines between points: (x, whether it begins there rather than ends)."""
    found = []
    for (x0, y0), (x1, y1) in pairwise(sorted(points)):
        if (y0 > 0) != (y1 > 0):
            share = y0 / (y0 - y1)
            x = math.exp(math.log(x0) + share * (math.log(x1) - math.log(x0))) if log else x0 + share * (x1 - x0)
            found.append((x, y1 > 0))
    return found


def picture(recipe: Recipe, rows: Sequence[Row], path: Path) -> Path:
    """Gains as a PNG file: a row of two axes for each series. Errors: SettingError without matplotlib."""
    found = shown(recipe, rows)
    figure = figures.new(11.0, 4.2 * len(found))
    axes = figure.subplots(len(found), 2, sharex=True, sharey="row", squeeze=False)
    figure.suptitle(f"{recipe.title}, {recipe.rounds} rounds: points above 0 are where federation pays")
    for (series, each), pair in zip(found.items(), axes, strict=True):
        for over, place in zip(OVER, pair, strict=True):
            _gain_on(place, recipe, each, over)
            place.set_title(f"gain over {over}{f', {series}' if series else ''}", fontsize=10)
        pair[0].set_ylabel("points of mean accuracy")
        drawn = {line.get_label(): line for place in pair for line in place.get_lines() if not line.get_label().startswith("_")}
        pair[0].legend(drawn.values(), drawn.keys(), frameon=False, fontsize=8)
    for place in axes[-1]:
        place.set_xlabel(recipe.axis)
    path.write_bytes(figures.png(figure))
    return path


def _gain_on(place: Any, recipe: Recipe, found: Sequence[dict[str, Any]], over: str) -> None:
    place.axhline(0.0, color="0.3", linewidth=1)
    for number, entry in enumerate(recipe.entries):
        points = sorted(gains(found, entry.label, over))
        if entry.label == over or not points:
            continue
        style = "--" if entry.label in (LOCAL, FEDAVG) else "-"
        place.plot(*zip(*points, strict=True), f"{style}o", color=figures.COLOURS[number], markersize=4, label=entry.label)
        for x, _ in crossovers(points, recipe.log):
            place.plot([x], [0.0], "x", color=figures.COLOURS[number], markersize=8)
    if recipe.log:
        place.set_xscale("log")
        ticks = sorted({row["x"] for row in found})
        place.set_xticks(ticks, [f"{x:g}" for x in ticks], minor=False)
        place.minorticks_off()
    figures.plain(place)
