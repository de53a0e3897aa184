"""A recipe's rows as text, and as a picture: gain over training alone and over tuned FedAvg, with the crossover."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from attune.common.pictures import figures
from attune.simulation.recipes.recipe import FEDAVG, LOCAL, TUNED, Recipe
from attune.simulation.recipes.run import Row, shown

OVER = (LOCAL, TUNED)
HEADS = ("mean", "worst", "harmed", "served", "constant", "MB", "seeds")


def lines(recipe: Recipe, rows: Sequence[Row]) -> Iterator[str]:
    """A table for each series, in %."""
    for series, found in shown(recipe, rows).items():
        yield f"{recipe.title}{f' ({series})' if series else ''}, {recipe.rounds} rounds; x: {recipe.axis}"
        yield f"{'x':>6}  {'method':<15}" + "".join(f" {head:>8}" for head in HEADS)
        for row in found:
            shares = [row[name] for name in ("mean", "worst", "harmed", "served", "constant")]
            cells = ["-" if each is None else f"{100 * each:.1f}" for each in shares]
            cells += [f"{row['bytes'] / 1e6:.2f}", str(row["seeds"])]
            yield f"{row['x']:>6g}  {row['method']:<15}" + "".join(f" {cell:>8}" for cell in cells)


def gains(found: Sequence[dict[str, Any]], method: str, over: str) -> list[tuple[float, float]]:
    """(x, points of accuracy) by which a method's mean is above another's, of each point where both are known."""
    means = {(row["x"], row["method"]): 100 * row["mean"] for row in found}
    return [(x, mean - means[x, over]) for (x, name), mean in means.items() if name == method and (x, over) in means]


def crossover(points: Sequence[tuple[float, float]], log: bool = True) -> float | None:
    """Where a gain first falls to 0, on the straight line between two points; None if it does not, or never was above it."""
    ordered = sorted(points)
    for (x0, y0), (x1, y1) in pairwise(ordered):
        if y0 > 0 >= y1:
            share = y0 / (y0 - y1)
            return math.exp(math.log(x0) + share * (math.log(x1) - math.log(x0))) if log else x0 + share * (x1 - x0)
    return None


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
        pair[0].legend(frameon=False, fontsize=8)
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
        if (x := crossover(points, recipe.log)) is not None:
            place.plot([x], [0.0], "x", color=figures.COLOURS[number], markersize=8)
    if recipe.log:
        place.set_xscale("log")
        ticks = sorted({row["x"] for row in found})
        place.set_xticks(ticks, [f"{x:g}" for x in ticks], minor=False)
        place.minorticks_off()
    figures.plain(place)
