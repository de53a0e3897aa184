"""Table of docs/settings.md about sharing across sizes of networks, from the rows of `benchmarks.across_sizes`."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev

from docs.markdown import table

PATH = Path(__file__).parent / "results" / "across_sizes.csv"
WITHIN = "FedAvg within the size, fine-tuned"
ACROSS = ("fedtp-any, fine-tuned", "HeteroFL, fine-tuned", "FedProto")


def lines(path: Path = PATH) -> Iterator[str]:
    """Yield a row for each way, then the gain of small devices over FedAvg within their size, with its standard error."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["part"] == "test"]
    tasks, ways = (list(dict.fromkeys(row[key] for row in rows)) for key in ("task", "way"))

    def scores(task: str, way: str, size: str) -> dict[str, float]:
        return {row["seed"]: float(row[size]) for row in rows if (row["task"], row["way"]) == (task, way)}

    def gain(task: str, way: str) -> str:
        base = scores(task, WITHIN, "small")
        gains = [score - base[seed] for seed, score in scores(task, way, "small").items()]
        return f"{fmean(gains):+.1f} ± {stdev(gains) / len(gains) ** 0.5:.1f}"

    seeds = {task: len({row["seed"] for row in rows if row["task"] == task}) for task in tasks}
    yield from table(
        ("small / large", *(f"{task}, {seeds[task]} seeds" for task in tasks)),
        (
            (
                way,
                *(
                    " / ".join(f"{fmean(scores(task, way, size).values()):.1f}" for size in ("small", "large"))
                    for task in tasks
                ),
            )
            for way in ways
        ),
    )
    yield ""
    yield from table(
        ("gain of small devices over FedAvg within their size", *tasks),
        ((way, *(gain(task, way) for task in tasks)) for way in ACROSS),
    )
