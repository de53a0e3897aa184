"""Tables by a schema against the same tables encoded by hand: heart disease, School and WISDM, with each model for tables.

`python -m benchmarks.schemas DATA OUT.json [NAME:MODEL ...]`; DATA is the folder with heart-disease, school and wisdm. A result
is written as soon as it is there, and what is written is not run again.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

import attune
from attune.common.schema import Schema
from attune.fedclient.data.arrays import Array
from attune.simulation.recipes.site_tables import CODES, read_heart, write_table

SEEDS = (0, 1, 2)
MODELS: dict[str, dict[str, Any]] = {
    "mlr": {"train.lr": 0.1, "train.momentum": 0.9},
    "dnn": {"train.lr": 0.05, "train.momentum": 0.9},
    "transformer": {"train.lr": 0.05, "train.momentum": 0.9},
}


@dataclass(frozen=True)
class ComparedTables:
    """A data set with natural sites.

    Attributes:
        x: Features, (N, F); missing values are NaN.
        y: Labels or targets, (N,).
        site: Site of each sample, (N,).
        columns: Names of the features.
        schema: A declared schema; "auto" merges what `describe` proposes.
        by_hand: The features as a person encodes them, from x.
    """

    x: Array
    y: Array
    site: Array
    columns: list[str]
    task: Literal["classes", "regression"]
    rounds: int
    schema: Schema | str
    by_hand: Callable[[Array], Array]


def heart(data: Path) -> ComparedTables:
    """Return heart disease of four hospitals, with seven columns as categories."""
    read = read_heart(data / "heart-disease" / "heart_disease.npz")

    def by_hand(x: Array) -> Array:
        """Return numbers with an indicator of what is missing, and a column for each code; a missing code has its own."""
        parts = []
        for column, name in zip(x.T, read.columns, strict=True):
            gaps = np.isnan(column)
            if name in CODES:
                parts += [np.where(gaps, 0.0, column == float(code)) for code in CODES[name]]
            else:
                parts.append(column)
            parts.append(gaps.astype(float))
        return np.column_stack(parts).astype(np.float32)

    return ComparedTables(read.x, read.y, read.site, list(read.columns), "classes", 20, read.schema or "auto", by_hand)


def school(data: Path) -> ComparedTables:
    """Return the exam scores of 139 schools."""
    read = np.load(data / "school" / "school.npz")
    names = [f"f{at}" for at in range(read["x"].shape[1])]
    return ComparedTables(read["x"], read["y"], read["school"], names, "regression", 10, "auto", lambda x: x)


def wisdm(data: Path) -> ComparedTables:
    """Return windows of an accelerometer of 36 persons."""
    read = np.load(data / "wisdm" / "wisdm.npz")
    y = read["labels"][read["y"]]
    return ComparedTables(read["x"], y, read["user"], read["columns"].tolist(), "classes", 20, "auto", lambda x: x)


SETS = {"heart": heart, "school": school, "wisdm": wisdm}


def write_tables(tables: ComparedTables, folder: Path) -> dict[str, Path]:
    """Write a CSV file for each site, as a site has it: empty cells where values are missing."""
    paths = {}
    for site in np.unique(tables.site).tolist():
        paths[f"site{site}"] = folder / f"site{site}.csv"
        write_table(paths[f"site{site}"], tables.columns, tables.x, tables.y, np.flatnonzero(tables.site == site))
    return paths


def arrays(tables: ComparedTables) -> dict[str, Any]:
    """Return the arrays of each site, encoded by hand. Gaps of a column without any value become 0."""
    given: dict[str, Any] = {}
    x = tables.by_hand(np.array([[float(f"{value:g}") for value in row] for row in tables.x], dtype=np.float32))
    for site in np.unique(tables.site).tolist():
        part = x[tables.site == site]
        part[:, np.isnan(part).all(axis=0)] = 0
        given[f"site{site}"] = (part, tables.y[tables.site == site])
    return given


def score(tables: ComparedTables, given: Mapping[str, Any], table: Mapping[str, Any], model: str, seed: int) -> float:
    """Return the mean score of the devices' own models, in points."""
    settings = {"train.local_epochs": 2, **MODELS[model]}
    label = "y" if "schema" in table else ""
    result = attune.simulate(
        given, "fedper", model=model, rounds=tables.rounds, seed=seed, settings=settings, label=label, task=tables.task,
        table=table, executor="stacked", progress=False,
    )  # fmt: skip
    return 100 * float(np.mean([row.accuracy for row in result.table()]))


def main(data: Path, out: Path, wanted: list[str]) -> None:
    """Run what is not in the file yet."""
    for job in wanted or [f"{name}:{model}" for name in SETS for model in MODELS]:
        name, _, model = job.partition(":")
        tables = SETS[name](data)
        with tempfile.TemporaryDirectory() as folder:
            paths = write_tables(tables, Path(folder))
            for seed in SEEDS:
                results: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
                key = f"{name} {model} {seed}"
                if key in results:
                    continue
                by_hand = score(tables, arrays(tables), {"missing": "median"}, model, seed)
                by_schema = score(tables, paths, {"schema": tables.schema}, model, seed)
                results[key] = {"by_hand": round(by_hand, 2), "by_schema": round(by_schema, 2)}
                out.write_text(json.dumps(results, indent=1) + "\n")
                print(key, results[key], flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
