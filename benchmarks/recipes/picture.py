"""Rows of a recipe as text and as a picture: gain over ordinary models alone and over tuned FedAvg, with crossovers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from attune.common.pictures import figures
from attune.common.task import TASKS
from benchmarks.recipes.catalogue import ALONE, FEDAVG, LOCAL, TUNED, Recipe
from benchmarks.recipes.run import RecipeRow, shown

HEADS = ("mean", "pooled", "worst", "harmed", "by group", "served", "constant", "MB", "seeds")
NO_BETTER = "*"  # marks the mean of a method that is no better than a constant answer


def lines(recipe: Recipe, rows: Sequence[RecipeRow]) -> Iterator[str]:
    """Yield the lines of a table for each series, in %."""
    for series, means in shown(recipe, rows).items():
        yield f"{recipe.title}{f' ({series})' if series else ''}, {recipe.rounds} rounds; x: {recipe.axis}"
        heads = (*HEADS, "MSE") if recipe.task == "regression" else HEADS
        yield f"{'x':>6}  {'method':<20}" + "".join(f" {head:>8}" for head in heads)
        for row in means:
            shares = [row[name] for name in HEADS[:7]]
            cells = ["-" if share is None else f"{100 * share:.1f}" for share in shares]
            cells[0] += NO_BETTER if no_better(row) else ""
            cells += [f"{row['bytes'] / 1e6:.2f}", str(row["seeds"]), *(() if row["mse"] is None else (f"{row['mse']:.1f}",))]
            yield f"{row['x']:>6g}  {row['method']:<20}" + "".join(f" {cell:>8}" for cell in cells)
        if any(map(no_better, means)):
            yield f"{NO_BETTER} no better than a constant answer"
    if recipe.note:
        yield recipe.note


def no_better(row: Mapping[str, Any]) -> bool:
    """Return whether a method's mean is no better than the mean of constant answers."""
    return bool(row["mean"] <= row["constant"])


def gains(rows: Sequence[dict[str, Any]], method: str, over: str) -> list[tuple[float, float]]:
    """Return (x, gain of a method's mean over another's in points of accuracy) for each point where both are known."""
    means = {(row["x"], row["method"]): 100 * row["mean"] for row in rows}
    return [(x, mean - means[x, over]) for (x, name), mean in means.items() if name == method and (x, over) in means]


def crossovers(points: Sequence[tuple[float, float]], log: bool = True) -> list[tuple[float, bool]]:
    """Return where a gain crosses 0 on the straight lines between points: (x, whether the gain begins there)."""
    crossings = []
    for (x0, y0), (x1, y1) in pairwise(sorted(points)):
        if (y0 > 0) != (y1 > 0):
            share = y0 / (y0 - y1)
            x = math.exp(math.log(x0) + share * (math.log(x1) - math.log(x0))) if log else x0 + share * (x1 - x0)
            crossings.append((x, y1 > 0))
    return crossings


def picture(recipe: Recipe, rows: Sequence[RecipeRow], path: Path) -> Path:
    """Draw gains as a PNG file with a row of two axes for each series, and return its path.

    Raises:
        SettingError: matplotlib is not installed.
    """
    by_series = shown(recipe, rows)
    figure = figures.new(11.0, 4.2 * len(by_series))
    axes = figure.subplots(len(by_series), 2, sharex=True, sharey="row", squeeze=False)
    figure.suptitle(f"{recipe.title}, {recipe.rounds} rounds: points above 0 are where federation pays")
    for (series, means), pair in zip(by_series.items(), axes, strict=True):
        for over, place in zip((ALONE if any(row.method == ALONE for row in rows) else LOCAL, TUNED), pair, strict=True):
            _gain_on(place, recipe, means, over)
            place.set_title(f"gain over {over}{f', {series}' if series else ''}", fontsize=10)
        pair[0].set_ylabel(f"points of mean {TASKS[recipe.task].metric}")
    lines = [line for place in axes.flat for line in place.get_lines() if not line.get_label().startswith("_")]
    drawn = {line.get_label(): line for line in lines}
    figure.legend(drawn.values(), drawn.keys(), frameon=False, fontsize=8, loc="outside lower center", ncols=6)
    for place in axes[-1]:
        place.set_xlabel(recipe.axis)
    path.write_bytes(figures.file_of(figure))
    return path


def _gain_on(place: Any, recipe: Recipe, means: Sequence[dict[str, Any]], over: str) -> None:
    place.axhline(0.0, color="0.3", linewidth=1)
    for number, entry in enumerate(recipe.entries):
        points = sorted(gains(means, entry.label, over))
        if entry.label == over or not points:
            continue
        style = "--" if entry.label in (ALONE, LOCAL, FEDAVG) else "-"
        place.plot(*zip(*points, strict=True), f"{style}o", color=figures.COLOURS[number], markersize=4, label=entry.label)
        for x, _ in crossovers(points, recipe.log):
            place.plot([x], [0.0], "x", color=figures.COLOURS[number], markersize=8)
    if recipe.log:
        place.set_xscale("log")
        ticks = sorted({row["x"] for row in means})
        place.set_xticks(ticks, [f"{x:g}" for x in ticks], minor=False)
        place.minorticks_off()
    figures.plain(place)
