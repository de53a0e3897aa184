"""Table of docs/methods/fedavg.md about the server's optimisers, from the rows of `benchmarks.shared_optimisers`."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

PATH = Path(__file__).parent / "results" / "shared_optimisers.csv"
TITLES = {"local": "training alone", "none": "FedAvg, the plain mean"}


def lines(path: Path = PATH) -> Iterator[str]:
    """Yield a line for each optimiser: mean accuracy over devices and seeds, least and largest seed, chosen rates."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["part"] == "test"]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    yield "| optimiser | " + " | ".join(f"`{task}`" for task in tasks) + " |"
    yield "|---" * (len(tasks) + 1) + "|"
    for name in dict.fromkeys(row["optimiser"] for row in rows):
        cells = [_cell([row for row in rows if (row["task"], row["optimiser"]) == (task, name)]) for task in tasks]
        yield f"| {TITLES.get(name, name)} | " + " | ".join(cells) + " |"
    constant = [fmean(float(row["constant"]) for row in rows if row["task"] == task) for task in tasks]
    yield "| a constant answer | " + " | ".join(f"{100 * value:.1f}" for value in constant) + " |"


def _cell(rows: list[dict[str, str]]) -> str:
    scores = [100 * float(row["accuracy"]) for row in rows]
    rates = f"{rows[0]['lr']}, {rows[0]['shared_lr']}".rstrip(", ")
    return f"{fmean(scores):.1f} ({min(scores):.1f} to {max(scores):.1f}; {rates})"
