"""Comparison of the models that devices keep with ordinary ones that each device fits alone.

`python -m benchmarks.kept_alone --recipe digits --x 20 --out benchmarks/results/kept_alone.csv` runs the missing rows: a
federation for each method with its default settings, and the devices' own reports.
docs/alone_tables.py shows the means with their intervals over seeds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import click

from attune.common.metrics import KEPT_RIVALS
from attune.common.statistics import findings_of, pairs_of
from attune.simulation.recipes.catalogue import CLOSED_FORM, Recipe, get
from attune.simulation.recipes.run import trained
from benchmarks.result_file import Results

KEY = ("recipe", "x", "method", "seed")
COLUMNS = (*KEY, "devices", "kept", "alone", "own", "harmed")
METHODS = ("FedAvg", "FedTP", "FedMCSA, dial")
LINEAR = {"FedTP": "MR-MTL"}  # where a recipe's model has no attention
ANALYTIC = replace(CLOSED_FORM, label="analytic")


def row_of(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a finished federation: means over devices, and the share of devices that are worse off than alone.

    A device is harmed if what it keeps is worse than its model alone by the exact paired test on its own test samples.
    """
    clients = [client for client in status["clients"] if client["accuracy_alone"] is not None]

    def mean(name: str) -> float:
        return round(fmean(client[name] for client in clients), 4)

    pairs = [[pair for pair in pairs_of(client, KEPT_RIVALS) if pair.rival == "alone"] for client in clients]
    harmed = [findings_of(of).get("alone") == "worse" for of in pairs]
    return {
        "devices": len(clients), "kept": mean("accuracy_kept"), "alone": mean("accuracy_alone"), "own": mean("accuracy_before"),
        "harmed": round(fmean(harmed), 4),
    }  # fmt: skip


def _run(
    recipe: Recipe, places: Sequence[float], data: str | None, seeds: Sequence[int], results: Results, methods: Sequence[str]
) -> None:
    """Run what is missing of a recipe."""
    known = {tuple(row[name] for name in KEY) for row in results.rows()}
    labels = {entry.label: entry for entry in (*recipe.entries, ANALYTIC)}
    entries = [labels.get(name) or labels[LINEAR[name]] for name in methods]
    for seed in seeds:
        source = recipe.load(data, seed)
        for point in recipe.points:
            left = [entry for entry in entries if (recipe.name, str(point.x), entry.label, str(seed)) not in known]
            if not left or (places and point.x not in places):
                continue
            with tempfile.TemporaryDirectory(prefix="attune-kept-") as folder:
                shards = point.write(Path(folder), source, seed)
                for entry in left:
                    key = {"recipe": recipe.name, "x": point.x, "method": entry.label, "seed": seed}
                    scaled = replace(recipe, standardise="federation") if entry == ANALYTIC else recipe
                    results.add([row := key | row_of(trained(scaled, entry, shards, seed).status)])
                    click.echo(row)


@click.command()
@click.option("--recipe", required=True, help="A recipe (docs/choosing.md).")
@click.option("--x", "places", multiple=True, type=float, help="Points of the recipe.  [default: all]")
@click.option("--data", help="The recipe's data set, if it is not bundled.")
@click.option("--seed", "seeds", multiple=True, type=int, default=(0, 1, 2), show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--method", "methods", multiple=True, default=METHODS, help="Rows to run; also: analytic.  [default: three]")
def main(
    recipe: str, places: Sequence[float], data: str | None, seeds: Sequence[int], out: Path, methods: Sequence[str]
) -> None:
    """Run what is missing in the file."""
    _run(get(recipe), places, data, seeds, Results(out, COLUMNS), methods)


if __name__ == "__main__":
    main()
