"""Tables of how much training the defaults are: models, rates and epochs on tasks of their own, and more rounds on recipes."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean

from docs.markdown import table

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
Row = Mapping[str, str]


def models(path: Path = RESULTS / "default_training.csv") -> Iterator[str]:
    """Yield the mean accuracies of FedAvg on held-out rows: by task and model at each rate, then by the number of epochs."""
    rows = _rows(path)
    swept = [row for row in rows if row["samples"] == "40"]
    columns = sorted({(int(row["rounds"]), float(row["lr"])) for row in swept})
    lines = []
    for task, model in dict.fromkeys((row["task"], row["model"]) for row in swept):
        mine = [row for row in swept if (row["task"], row["model"]) == (task, model)]
        cells = [_mean(row for row in mine if (int(row["rounds"]), float(row["lr"])) == column) for column in columns]
        lines.append((task, f"`{model}`", *cells))
    heads = (f"{lr:g}, {number} rounds" for number, lr in columns)
    yield from table(("task", "model", *heads), lines)
    yield ""
    lengths = [row for row in rows if row["samples"] != "40"]
    epochs = sorted({row["epochs"] for row in lengths}, key=int)
    lines = []
    for task, samples in dict.fromkeys((row["task"], row["samples"]) for row in lengths):
        mine = [row for row in lengths if (row["task"], row["samples"]) == (task, samples)]
        lines.append((task, samples, *(_mean(row for row in mine if row["epochs"] == number) for number in epochs)))
    yield from table(("task", "samples, at most", *(f"{number} epochs" for number in epochs)), lines)


def enough(path: Path = RESULTS / "enough.csv") -> Iterator[str]:
    """Yield a row for each point and method: own models with the defaults, an early end, and ten times the rounds."""
    rows, lines = _rows(path), []
    for point, method in dict.fromkeys((row["point"], row["method"]) for row in rows):
        by = {row["budget"]: row for row in rows if (row["point"], row["method"]) == (point, method)}
        if "default" in by:
            usual = by["default"]
            cells = [
                f"{_percent(by[name])} ({by[name]['rounds']})" if name in by else ""
                for name in ("default", "auto", "ten times")
            ]
            lines.append((point, f"`{method}`", f"`{usual['model']}`", usual["epochs"], *cells))
    yield from table(("point", "method", "model", "epochs", "40 rounds", "`auto`", "400 rounds"), lines)


def _percent(row: Row) -> str:
    return f"{100 * float(row['own']):.1f}"


def _mean(rows: Iterable[Row]) -> str:
    values = [100 * float(row["accuracy"]) for row in rows]
    return f"{fmean(values):.1f}" if values else ""


def _rows(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
