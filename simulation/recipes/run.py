"""Carries a recipe out: a CSV row for each point, seed and method; one that was interrupted goes on.

Compared are the models that devices end with, on their own test parts. harmed: devices whose model is worse than what they
would have by training alone or by FedAvg, by the exact paired test with Holm's correction.
"""

from __future__ import annotations

import csv
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from attune.common.interval import LEVEL
from attune.common.statistics import holm, mcnemar
from attune.fedclient.partition.datasets import DIGITS, load_source
from attune.fedclient.partition.samples import Source
from attune.fedclient.partition.split import write_shards
from attune.simulation.recipes.recipe import LOCAL, RIVALS, TUNED, Entry, Point, Recipe
from attune.simulation.result import Result
from attune.simulation.simulate import simulate

Right = dict[str, npt.NDArray[np.bool_]]  # of each device, which of its test labels are found: (n,), or (n, T)
How = Literal["sequential", "stacked", "auto"]


class Row(msgspec.Struct, frozen=True):
    """Accuracies are of the models that devices end with, but for `judged` and `served`.

    judged: by the method's own protocol. served: of what the server sends, without training on the device; None: nothing.
    bytes: that a device sent and received, all rounds together.
    """

    series: str
    x: float
    seed: int
    method: str
    devices: int
    samples: float  # for training, mean over devices
    mean: float
    pooled: float
    worst: float
    judged: float | None
    served: float | None
    constant: float | None
    harmed: float  # share of the devices
    bytes: int
    seconds: float


def run(
    recipe: Recipe, data: str | None, out: Path, say: Callable[[str], None], executor: How = "auto", seeds: Sequence[int] = ()
) -> list[Row]:
    """All rows of the recipe, which are in out/NAME.csv too. Errors: those of load_source, partition and simulate."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{recipe.name}.csv"
    found = read(path)
    for seed in seeds or recipe.seeds:
        source = load_source(data or DIGITS, seed, **recipe.read)
        for point in recipe.points:
            there = {row.method for row in found if (row.series, row.x, row.seed) == (point.series, point.x, seed)}
            if there < {entry.label for entry in recipe.entries}:
                say(f"{recipe.title}: {point.series} {recipe.axis} {point.x:g}, seed {seed}")
                made = _point(recipe, point, source, seed, executor)
                write(path, made)
                found += made
    return found


def _point(recipe: Recipe, point: Point, source: Source, seed: int, executor: How) -> list[Row]:
    """Every method on the same shards."""
    with tempfile.TemporaryDirectory(prefix="attune-recipe-") as folder:
        shards = write_shards(Path(folder) / "shards", point.cut(source, seed))
        results: dict[str, tuple[Entry, Result, float]] = {}
        for entry in recipe.entries:
            began = time.monotonic()
            settings = {**recipe.settings, **entry.settings}
            result = simulate(
                [str(each) for each in shards],
                entry.method,
                None,
                recipe.rounds,
                seed,
                settings,
                entry.baseline,
                executor=executor,
                progress=False,
            )
            results[entry.label] = entry, result, time.monotonic() - began
        right = {label: right_of(result, shards) for label, (_, result, _) in results.items()}
    return [_row(point, seed, entry, result, seconds, right) for entry, result, seconds in results.values()]


def right_of(result: Result, shards: Sequence[Path]) -> Right:
    """Which labels of its test part each device finds with the model that it ends with."""
    found = {}
    for shard in shards:
        with np.load(shard / "test.npz") as test:
            found[shard.name] = np.asarray(result.model(shard.name).predict(test["x"])) == test["y"]
    return found


def _row(point: Point, seed: int, entry: Entry, result: Result, seconds: float, right: Mapping[str, Right]) -> Row:
    mine, clients = right[entry.label], result.status["clients"]
    rivals = {name: right[name] for name in RIVALS if name != entry.label and name in right}
    accuracies = [float(each.mean()) for each in mine.values()]

    def mean_of(key: str) -> float | None:
        known = [client[key] for client in clients if client[key] is not None]
        return round(fmean(known), 4) if known else None

    return Row(
        series=point.series,
        x=point.x,
        seed=seed,
        method=entry.label,
        devices=len(mine),
        samples=round(fmean(client["samples"] for client in clients), 1),
        mean=round(fmean(accuracies), 4),
        pooled=round(float(np.concatenate([each.reshape(-1) for each in mine.values()]).mean()), 4),
        worst=round(min(accuracies), 4),
        judged=mean_of("accuracy"),
        served=None if entry.label == LOCAL else mean_of("accuracy_common" if entry.label == TUNED else "accuracy_before"),
        constant=mean_of("accuracy_constant"),
        harmed=round(fmean(harmed(mine[name], {rival: each[name] for rival, each in rivals.items()}) for name in mine), 4),
        bytes=result.bytes_moved // len(mine),
        seconds=round(seconds, 1),
    )


def harmed(mine: npt.NDArray[np.bool_], rivals: Mapping[str, npt.NDArray[np.bool_]]) -> bool:
    """Whether a device's model is worse than one of its rivals by more than chance; of equal ones at most 5 % are called so."""
    counts = {}
    for name, theirs in rivals.items():
        gain = (mine.astype(int) - theirs.astype(int)).reshape(len(mine), -1).sum(axis=1)
        counts[name] = int((gain > 0).sum()), int((gain < 0).sum())
    return worse_off(counts)


def worse_off(counts: Mapping[str, tuple[int, int]]) -> bool:
    """counts: of each rival, on how many test samples the device's model is better and on how many worse."""
    p = holm({name: mcnemar(better, worse) for name, (better, worse) in counts.items()})
    return any(p[name] <= 1 - LEVEL and worse > better for name, (better, worse) in counts.items())


def read(path: Path) -> list[Row]:
    """The rows of a file that `write` made; none if it is not there."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        plain = [{key: value or None for key, value in row.items()} for row in csv.DictReader(file)]
    return [msgspec.convert({**row, "series": row["series"] or ""}, Row, strict=False) for row in plain]


def write(path: Path, rows: Sequence[Row]) -> None:
    """Adds rows, all of a point at once."""
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, Row.__struct_fields__, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(msgspec.to_builtins(row) for row in rows)


def shown(recipe: Recipe, rows: Sequence[Row]) -> dict[str, list[dict[str, Any]]]:
    """series -> what a reader compares, means over seeds: a row for each point and method, in the recipe's order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for point in recipe.points:
        for entry in recipe.entries:
            mine = [row for row in rows if (row.series, row.x, row.method) == (point.series, point.x, entry.label)]
            if mine:
                served = [row.served for row in mine if row.served is not None]
                found.setdefault(point.series, []).append(
                    {
                        "x": point.x,
                        "method": entry.label,
                        "mean": fmean(row.mean for row in mine),
                        "worst": fmean(row.worst for row in mine),
                        "harmed": fmean(row.harmed for row in mine),
                        "served": fmean(served) if served else None,
                        "constant": fmean(row.constant or 0.0 for row in mine),
                        "bytes": fmean(row.bytes for row in mine),
                        "seeds": len(mine),
                    }
                )
    return found
