"""Table of docs/methods/README.md, which `make docs` writes from the rows of `benchmarks.methods`."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path

PATH = Path(__file__).parent / "results" / "methods.csv"
RIVALS = PATH.parent / "rivals.csv"  # python -m benchmarks.rivals on the same shards


def sections(path: Path = PATH, rivals: Path = RIVALS) -> Iterator[str]:
    """Return a line for scikit-learn alone and for each method, the best one first, and the accuracy of a constant answer."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: -float(row["mean_over_clients"]))
    yield "| method | mean over devices | worst device | its common model | harmed |"
    yield "|---|---|---|---|---|"
    with rivals.open(newline="", encoding="utf-8") as file:
        alone = [row["mean"] for row in csv.DictReader(file) if (row["recipe"], row["rival"]) == ("all-methods", "chosen")]
    yield from (f"| alone (scikit-learn) | {float(mean):.3f} | | | |" for mean in alone)
    for row in rows:
        yield f"| `{row['method']}` | {_line(row)} | {_percent(row['harmed'])} |"
    yield f"| a constant answer | {float(rows[0]['constant']):.3f} | | | |"


def _line(row: Mapping[str, str]) -> str:
    return " | ".join(f"{float(row[name]):.3f}" if row[name] else "" for name in ("mean_over_clients", "lowest", "common"))


def _percent(share: str) -> str:
    return f"{100 * float(share):.0f} %" if share else ""
