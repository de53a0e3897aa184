"""Table of docs/methods/fedtp.md about a device's first model, from the rows of `benchmarks.described`."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

PATH = Path(__file__).parent / "results" / "described.csv"
WAYS = {
    "trained devices": "trained devices, for comparison",
    "constant answer": "a constant answer",
    "mean embedding": "the mean embedding",
    "mean output": "the mean of what the network makes for all, as without a description",
    "first features": '**its description, as `"described"`**',
    "common model's features": "likewise, moments under the trained common model",
    "common model's answers": "likewise, mean answers of the trained common model",
    "labels": "true shares of classes, a bound",
    "fitted": "embedding fitted to the newcomer's labels, a bound",
}


def lines(path: Path = PATH) -> Iterator[str]:
    """Yield a line for each way: accuracy in %, the mean over newcomers and seeds, with the least and the largest seed."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    tasks = list(dict.fromkeys((row["task"], row["devices"]) for row in rows))
    seeds = {task: len({row["seed"] for row in rows if (row["task"], row["devices"]) == task}) for task in tasks}
    yield (
        "| first model from | "
        + " | ".join(f"{task}, {devices} devices, {seeds[task, devices]} seeds" for task, devices in tasks)
        + " |"
    )
    yield "|---" * (len(tasks) + 1) + "|"
    for way, title in WAYS.items():
        yield f"| {title} | " + " | ".join(_cell(rows, task, way) for task in tasks) + " |"


def _cell(rows: list[dict[str, str]], task: tuple[str, str], way: str) -> str:
    scores = [100 * float(row["accuracy"]) for row in rows if (row["task"], row["devices"], row["way"]) == (*task, way)]
    return f"{fmean(scores):.1f} ({min(scores):.1f} to {max(scores):.1f})"
