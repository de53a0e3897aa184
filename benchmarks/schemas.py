"""Tables by a schema against the same tables encoded by hand: heart disease, School and WISDM, with each model for tables.

`python -m benchmarks.schemas DATA OUT.json [NAME:MODEL ...]`; DATA is the folder with heart-disease, school and wisdm. A result
is written as soon as it is there, and what is written is not run again. Both encodings are trained and tested on the same rows,
and begin from the same seeds, so their difference in a seed is that of the encodings.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np

import attune
from attune.common.schema import Schema
from attune.common.seeds import derive
from attune.common.statistics import interval_of_mean
from attune.fedclient.data.arrays import Array
from attune.fedclient.data.holdout import held_out, row_hashes
from attune.fedclient.data.source import read_source
from attune.fedclient.read_options import ReadOptions
from attune.simulation.arguments import read_shards
from benchmarks.recipes.site_tables import CODES, read_heart, write_table

SEEDS, FEW = 8, 3  # runs with each encoding; few of what takes minutes
MODELS: dict[str, dict[str, Any]] = {
    "mlr": {"train.lr": 0.1, "train.momentum": 0.9},
    "dnn": {"train.lr": 0.05, "train.momentum": 0.9},
    "transformer": {"train.lr": 0.05, "train.momentum": 0.9},
}


TITLES = {
    "heart": "heart disease, 4 hospitals, accuracy",
    "wisdm": "WISDM, 36 persons, accuracy",
    "school": "School, 139 schools, R2",
}
PATH = Path(__file__).parent / "results" / "schemas.json"


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


def arrays(tables: ComparedTables, paths: Mapping[str, Path]) -> dict[str, Any]:
    """Return the arrays of each site, encoded by hand. The rows that a device holds out of its table are the test part."""
    options = ReadOptions.of("y", task=tables.task, schema=tables.schema)
    shards = read_shards(paths, options)
    x = tables.by_hand(np.array([[float(f"{value:g}") for value in row] for row in tables.x], dtype=np.float32))
    given: dict[str, Any] = {}
    for site in np.unique(tables.site).tolist():
        name, rows = f"site{site}", tables.site == site
        source = read_source(paths[name], replace(options, schema=shards[name].load().schema, proposes=False))
        held = held_out(row_hashes(*source.train, derive(0, "held-rows")), ())
        part, y = x[rows], tables.y[rows]
        if held.sum() != shards[name].profile.test_samples:
            raise RuntimeError(f"{name} holds out other rows of its table")
        part[:, np.isnan(part[~held]).all(axis=0)] = 0  # a column without any value
        given[name] = (part[~held], y[~held], part[held], y[held])
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
        with tempfile.TemporaryDirectory() as folder:
            tables = SETS[name](data)
            paths = write_tables(tables, Path(folder))
            for seed in range(FEW if model == "transformer" and name != "heart" else SEEDS):
                run(out, f"{name} {model} {seed}", tables, paths, model, seed)


def run(out: Path, key: str, tables: ComparedTables, paths: Mapping[str, Path], model: str, seed: int) -> None:
    """Train with both encodings, and write each score to the file, if it is not there."""
    for way in ("by_hand", "by_schema"):
        results: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
        row = results.setdefault(key, {})
        if way in row:
            continue
        given = arrays(tables, paths) if way == "by_hand" else paths
        table = {"missing": "median"} if way == "by_hand" else {"schema": tables.schema}
        row[way] = round(score(tables, given, table, model, seed), 2)
        out.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        print(key, row, flush=True)


def lines(path: Path = PATH) -> Iterator[str]:
    """Yield the table of docs/choosing.md: mean scores over seeds, and the paired difference with its interval."""
    results = json.loads(path.read_text(encoding="utf-8"))
    yield "| data | model | seeds | schema | by hand | difference |"
    yield "|---" * 6 + "|"
    for name, title in TITLES.items():
        for model in MODELS:
            runs = [row for key, row in results.items() if key.startswith(f"{name} {model} ") and len(row) == 2]
            apart = [row["by_schema"] - row["by_hand"] for row in runs]
            if (interval := interval_of_mean(apart)) is None:
                continue
            means = (f"{fmean(row[way] for row in runs):.1f}" for way in ("by_schema", "by_hand"))
            shown = "{:+.1f} ({:.1f} to {:.1f})".format(
                *(round(value, 1) + 0.0 for value in (fmean(apart), *interval))
            )  # no -0.0
            cells = (title, f"`{model}`", f"{len(runs)}", *means, shown)
            yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
