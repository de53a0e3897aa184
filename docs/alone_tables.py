"""Tables of ordinary models alone: in docs/choosing.md beside the best method, in docs/does-it-help.md beside what is kept."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from attune.common.statistics import interval_of_mean
from attune.simulation.recipes.catalogue import ALONE, LOCAL, RECIPES
from docs.markdown import table

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
LEAST_GAIN, MOST_HARMED = -0.5, 2.0  # the target: points over alone; devices that are harmed, in %
CHOSEN = "chosen"  # the rows of rivals.csv with what each device chose
Row = Mapping[str, str]


def rivals(folder: Path = RESULTS) -> Iterator[str]:
    """Yield a row for each point of a recipe: what devices choose alone outside Attune, and the best method's row.

    Beside the choice stands the one model that is best for all devices together, which no device can know.
    """
    lines, level = [], 0
    of_recipes = [row for row in _rows(folder / "rivals.csv") if row["recipe"] in RECIPES]
    for (recipe, series, x), mine in _grouped(of_recipes, "recipe", "series", "x").items():
        alone = {row["seed"]: _percent(row, "mean") for row in mine if row["rival"] == CHOSEN}
        path = folder / "recipes" / f"{recipe}.csv"
        here = [row for row in _rows(path) if (row["series"], float(row["x"])) == (series, float(x))]
        here = [row for row in here if row["method"] not in (ALONE, LOCAL) and row["seed"] in alone]
        if not here:
            continue
        means = {key[0]: fmean(_percent(row, "mean") for row in of) for key, of in _grouped(here, "method").items()}
        best = max(means, key=lambda method: means[method])
        seeds = {row["seed"] for row in here if row["method"] == best}
        mean = fmean(alone[seed] for seed in seeds)
        devices = max(int(row["devices"]) for row in mine)
        single = [row for row in mine if row["rival"] != CHOSEN and row["seed"] in seeds and int(row["devices"]) == devices]
        score, model = max(
            (fmean(_percent(row, "mean") for row in of), key[0]) for key, of in _grouped(single, "rival").items()
        )
        level += mean >= means[best]
        name = f"`{recipe}`" + (f", {series}" if series else "")
        rival, method = f"{score:.1f}, {model}", f"{means[best]:.1f}, {best}"
        lines.append((name, x, str(len(seeds)), f"{mean:.1f}", rival, method, f"{mean - means[best]:+.1f}"))
    heads = ("recipe", "x", "seeds", "alone, chosen", "alone, the best for all", "best method", "chosen less the best method")
    yield from table(heads, lines)
    yield ""
    yield f"Alone is level or ahead at {level} of {len(lines)} points."


def kept_alone(path: Path = RESULTS / "kept_alone.csv") -> Iterator[str]:
    """Yield a row for each point and method, and below the table in how many the target is missed."""
    lines: list[tuple[str, ...]] = []
    behind, surely, harmed = [], [], []
    for (recipe, x, method), mine in _grouped(_rows(path), "recipe", "x", "method").items():
        gains = [_percent(row, "kept") - _percent(row, "alone") for row in mine]
        gain, between = fmean(gains), interval_of_mean(gains)
        share = fmean(_percent(row, "harmed") for row in mine)
        name = f"{method} on {recipe} {x}"
        behind += [name] * (gain < LEAST_GAIN)
        surely += [name] * (between is not None and between[1] < LEAST_GAIN)
        harmed += [name] * (share > MOST_HARMED)
        shown = f"{gain:+.1f}" if between is None else "{:+.1f} ({:+.1f} to {:+.1f})".format(gain, *between)
        means = (f"{fmean(_percent(row, column) for row in mine):.1f}" for column in ("alone", "kept", "own"))
        lines.append((f"`{recipe}`", x, method, str(len(mine)), *means, shown, f"{share:.1f}"))
    heads = ("recipe", "x", "method", "seeds", "alone", "kept", "own model", "gain over alone, points", "harmed, %")
    yield from table(heads, lines)
    yield ""
    yield f"Of {len(lines)} rows, the gain misses the target"
    yield f"by the interval in {_named(surely)}, and by the mean in {_named(behind)}."
    yield f"More than {MOST_HARMED:g} % are harmed in {_named(harmed)}."


def _rows(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _grouped(rows: Iterable[Row], *columns: str) -> dict[tuple[str, ...], list[Row]]:
    """Return the rows by what they have in these columns, in the order of the file."""
    grouped: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        grouped.setdefault(tuple(row[column].removesuffix(".0") for column in columns), []).append(row)
    return grouped


def _percent(row: Row, column: str) -> float:
    return 100 * float(row[column])


def _named(names: Sequence[str]) -> str:
    return f"{len(names)} ({'; '.join(names)})" if names else "none"
