"""Tables of ordinary models alone: in docs/choosing.md beside the best method, in docs/does-it-help.md beside what is kept."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from attune.common.statistics import interval_of_mean
from benchmarks.recipes.catalogue import ALONE, LOCAL, RECIPES
from benchmarks.recipes.run import read
from docs.markdown import table

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
LEAST_GAIN = -0.5  # the target: points over alone
CHOSEN = "chosen"  # the rows of rivals.csv with what each device chose
SHOWN = (ALONE, "closed form", "FedAvg", "FedAvg, tuned", "FedPer", "FedTP", "auto")
GLANCE = (
    ("digits", 20, "digits, 10 devices of 20 samples"),
    ("feature-shift", 4, "digits, 16 devices of 60 samples, seen in four ways"),
    ("relatedness", 1, "digits, 12 devices of 60 samples, each with names of its own for the classes"),
    ("hospitals", 1, "heart disease, 4 hospitals"),
    ("school", 20, "exam scores, 139 schools of 20 pupils (R2)"),
    ("wisdm", 50, "activities, 36 persons with 50 windows"),
    ("one-minute", 1, "activities, 30 persons with a window of each"),
)
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
        here = [row for row in (_rows(path) if path.exists() else ()) if (row["series"], float(row["x"])) == (series, float(x))]
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


def kept_alone(folder: Path = RESULTS / "recipes") -> Iterator[str]:
    """Yield what devices gain over alone, a line for each point of a recipe, and in how many cells the target is missed."""
    rows = {name: read(folder / f"{name}.csv") for name in RECIPES}
    labels = list(dict.fromkeys(entry.label for name in RECIPES for entry in RECIPES[name].entries if entry.label != ALONE))
    lines: list[tuple[str, ...]] = []
    behind, surely, cells = [], [], 0
    for name, of in rows.items():
        for series, x in dict.fromkeys((row.series, row.x) for row in of):
            here = [row for row in of if (row.series, row.x) == (series, x)]
            alone = {row.seed: 100 * row.mean for row in here if row.method == ALONE}
            place = f"`{name}`{f', {series}' if series else ''}"
            line = [place, f"{x:g}", f"{fmean(alone.values()):.1f}" if alone else ""]
            for label in labels:
                gains = [100 * row.mean - alone[row.seed] for row in here if row.method == label and row.seed in alone]
                between = interval_of_mean(gains)
                cells += bool(gains)
                behind += [f"{label} on {place} {x:g}"] * bool(gains and fmean(gains) < LEAST_GAIN)
                surely += [f"{label} on {place} {x:g}"] * (between is not None and between[1] < LEAST_GAIN)
                shown = "" if between is None else " ({:+.1f} to {:+.1f})".format(*between)
                line.append(f"{fmean(gains):+.1f}{shown}" if gains else "")
            lines += [tuple(line)] if any(line[3:]) else []
    yield from table(("recipe", "x", "alone", *labels), lines)
    yield ""
    yield f"Of {cells} cells, the gain misses the target of {LEAST_GAIN} points"
    yield f"by the interval in {_named(surely)}, and by the mean in {_named(behind)}."


def at_a_glance(folder: Path = RESULTS / "recipes") -> Iterator[str]:
    """Yield a line for one point of each kind of data: a constant answer, alone, and what devices keep by some methods."""
    lines = []
    for name, x, what in GLANCE:
        rows = [row for row in read(folder / f"{name}.csv") if row.x == x and not row.series.startswith("four")]
        means = {label: fmean(100 * row.mean for row in rows if row.method == label) for label in {row.method for row in rows}}
        constant = fmean(100 * row.constant for row in rows if row.constant is not None)
        lines.append((what, f"{constant:.1f}", *(f"{means[label]:.1f}" if label in means else "" for label in SHOWN)))
    yield from table(("data", "constant answer", *SHOWN), lines)


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
