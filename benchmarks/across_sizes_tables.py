"""Table of docs/settings.md about sharing across sizes of networks, from the rows of `benchmarks.across_sizes`."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev

from docs.markdown import table

PATH = Path(__file__).parent / "results" / "across_sizes.csv"
WITHIN = "FedAvg within the size, fine-tuned"
ACROSS = ("HeteroFL, fine-tuned", "fedtp-any, fine-tuned", "fedtp-any without steps, fine-tuned", "FedProto")
WAYS = ("constant answer", "closed form", "own network alone", WITHIN, *ACROSS, "FedProto without prototypes")


def lines(path: Path = PATH) -> Iterator[str]:
    """Yield a row for each way, then the gain of small devices over FedAvg within their size, with its standard error."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["part"] == "test"]
    tasks = sorted({row["task"] for row in rows})

    def scores(task: str, way: str, size: str) -> dict[str, float]:
        return {row["seed"]: float(row[size]) for row in rows if (row["task"], row["way"]) == (task, way)}

    def cell(task: str, way: str) -> str:
        return " / ".join(f"{fmean(scores(task, way, size).values()):.1f}" for size in ("small", "large"))

    def gain(task: str, way: str) -> str:
        base = scores(task, WITHIN, "small")
        gains = [score - base[seed] for seed, score in scores(task, way, "small").items()]
        return f"{fmean(gains):+.1f} ± {stdev(gains) / len(gains) ** 0.5:.1f}"

    counted = (f"{task}, {len(scores(task, WITHIN, 'small'))} seeds" for task in tasks)
    yield from table(("small / large, in %", *counted), ((way, *(cell(task, way) for task in tasks)) for way in WAYS))
    yield ""
    heads = ("what small devices gain over FedAvg within their size", *tasks)
    yield from table(heads, ((way, *(gain(task, way) for task in tasks)) for way in ACROSS))
