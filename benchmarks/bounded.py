"""Share of honest updates that the norm bound would touch without attackers, by its size: a row for each method and split.

`python -m benchmarks.bounded --out benchmarks/results/bounded.csv`. No bound is applied. Each change is measured in medians of
its cohort, so all sizes of the bound are judged on the same run. Rows that the file has are not measured again.
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click

from attune import simulate
from attune.fedserver.lab import checks
from attune.simulation.partition.datasets import load_dataset
from benchmarks.robust import MODELS, OFF, cut

SIZES = (1.5, 2.0, 3.0, 5.0)
FAR = {"method.bound_change": 1e9}  # norms are computed only if there is a bound
METHODS = ("fedavg", "fedtp", "fedmcsa", "pfedme")
SPLITS: dict[str, dict[str, Any]] = {
    "dirichlet 1.0": {"alpha": 1.0},
    "dirichlet 0.1": {"alpha": 0.1},
    "two classes": {"classes_per_client": 2},
}
COLUMNS = ("data", "split", "method", "rounds", "updates", *(f"above_{size:g}" for size in SIZES), "largest")


def medians_of(method: str, split: str, devices: int, rounds: int) -> list[float]:
    """Return the norms of changes in medians of their cohort, for each part that an honest device hands in, in each round."""
    found: list[float] = []
    real = checks.above_bound

    def kept(norms: Mapping[str, float], multiple: float, reference: float) -> dict[str, float]:
        found.extend(real(norms, 1e-9, reference).values())
        return real(norms, multiple, reference)

    shards = dict(cut(load_dataset("digits"), devices, SPLITS[split], 0).devices)
    model, options = MODELS.get(method, ("dnn", {}))
    with patch.object(checks, "above_bound", kept):
        simulate(shards, method, model, rounds, 0, {**options, **OFF, **FAR}, executor="stacked", progress=False)
    return found


@click.command()
@click.option("--devices", default=10)
@click.option("--rounds", default=20)
@click.option("--method", "methods", multiple=True, default=METHODS)
@click.option("--split", "splits", multiple=True, default=tuple(SPLITS))
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
def main(devices: int, rounds: int, methods: tuple[str, ...], splits: tuple[str, ...], out: Path) -> None:
    """Append a row to --out as each federation ends."""
    logging.getLogger("fedserver").setLevel(logging.ERROR)
    done = set()
    if out.exists():
        with out.open(newline="", encoding="utf-8") as file:
            done = {(row["split"], row["method"]) for row in csv.DictReader(file)}
    for split in splits:
        for method in methods:
            if (split, method) in done:
                continue
            found = medians_of(method, split, devices, rounds)
            above = [sum(each > size for each in found) for size in SIZES]
            row = ("digits", split, method, rounds, len(found), *above, f"{max(found):.2f}")
            new = not out.exists()
            with out.open("a", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([*([COLUMNS] if new else []), row])
            click.echo(" ".join(map(str, row)))


if __name__ == "__main__":
    main()
