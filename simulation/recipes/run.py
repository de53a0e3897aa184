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

from attune.common.methods.registry import get
from attune.common.statistics import LEVEL, holm, mcnemar
from attune.fedclient.data.shard import load_shard
from attune.fedclient.work.permutation import sign_flip
from attune.simulation.partition.datasets import DIGITS, load_source
from attune.simulation.partition.samples import Source
from attune.simulation.partition.split import write_shards
from attune.simulation.recipes.recipe import LOCAL, RIVALS, Entry, Point, Recipe
from attune.simulation.result import Result
from attune.simulation.simulate import simulate

Groups = npt.NDArray[np.intp]
Right = dict[str, npt.NDArray[np.bool_]]  # of each device, which of its test labels are found: (n,), or (n, T)
How = Literal["sequential", "stacked", "auto"]


class Row(msgspec.Struct, frozen=True):
    """Accuracies are of the models that devices end with, but for `judged` and `served`.

    judged: by the method's own protocol. served: `_served`.
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
    harmed: float  # share of the devices, as if all test samples were independent
    harmed_by_groups: float  # a group of test samples is one piece of evidence, where shards have groups; else the same
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
            left = [entry for entry in recipe.entries if entry.label not in there]
            if left:
                say(f"{recipe.title}: {point.series} {recipe.axis} {point.x:g}, seed {seed}")
                made = _point(recipe, left, point, source, seed, executor)
                write(path, made)
                found += made
    return found


def _point(recipe: Recipe, entries: Sequence[Entry], point: Point, source: Source, seed: int, executor: How) -> list[Row]:
    """Rows of these entries, on the same shards; rivals are run with them, for who is harmed."""
    with tempfile.TemporaryDirectory(prefix="attune-recipe-") as folder:
        shards = write_shards(Path(folder) / "shards", point.cut(source, seed))
        results: dict[str, tuple[Entry, Result, float]] = {}
        for entry in recipe.entries:
            if entry not in entries and entry.label not in RIVALS:
                continue
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
        groups = {shard.name: groups_of(shard) for shard in shards}
        asked = [each for each in results.values() if each[0] in entries]
        return [_row(point, seed, entry, result, seconds, right, groups) for entry, result, seconds in asked]


def right_of(result: Result, shards: Sequence[Path]) -> Right:
    """Which labels of its test part each device finds with the model that it ends with."""
    found = {}
    for shard in shards:
        with np.load(shard / "test.npz") as test:
            found[shard.name] = np.asarray(result.model(shard.name).predict(test["x"])) == test["y"]
    return found


def groups_of(shard: Path) -> Groups | None:
    """Of the test samples, as places from 0 on; None where each is by itself."""
    groups = load_shard(shard).test_groups
    return None if groups is None else np.unique(groups, return_inverse=True)[1]


def _row(
    point: Point, seed: int, entry: Entry, result: Result, seconds: float, right: Mapping[str, Right],
    groups: Mapping[str, Groups | None],
) -> Row:  # fmt: skip
    mine, clients = right[entry.label], result.status["clients"]
    rivals = {name: right[name] for name in RIVALS if name != entry.label and name in right}
    each_of = {device: {rival: each[device] for rival, each in rivals.items()} for device in mine}
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
        served=_served(entry, result),
        constant=mean_of("accuracy_constant"),
        harmed=round(fmean(harmed(mine[name], each_of[name]) for name in mine), 4),
        harmed_by_groups=round(fmean(harmed(mine[name], each_of[name], groups[name]) for name in mine), 4),
        bytes=result.bytes_moved // len(mine),
        seconds=round(seconds, 1),
    )


def _served(entry: Entry, result: Result) -> float | None:
    """The mean accuracy of what the server sends, before any training on the device; None: it sends nothing.

    Where an evaluation is not of that (a method that is judged by its trained models, a dial that has chosen, a model that is
    fine-tuned before it predicts), it is what the last round of training began from, or the common model.
    """
    method, clients = get(entry.method), result.status["clients"]
    if entry.label == LOCAL:
        return None
    if method.predictor == "fine-tune":
        found = [client["accuracy_common"] for client in clients]
    elif method.evaluate == "trained" or entry.settings.get("method.dial"):
        found = [client["before"] for client in result.summary["clients"]]
    else:
        found = [client["accuracy_before"] for client in clients]
    return round(fmean(found), 4) if found and None not in found else None


def harmed(mine: npt.NDArray[np.bool_], rivals: Mapping[str, npt.NDArray[np.bool_]], groups: Groups | None = None) -> bool:
    """Whether a device's model is worse than one of its rivals by more than chance; of equal ones at most 5 % are called so.

    groups (n,): places of the test samples' groups, of which one is a single piece of evidence.
    """
    p, gain = {}, {}
    for name, theirs in rivals.items():
        gain_n = (mine.astype(int) - theirs.astype(int)).reshape(len(mine), -1).mean(axis=1)
        better, worse = int((gain_n > 0).sum()), int((gain_n < 0).sum())
        p[name] = mcnemar(better, worse) if groups is None else sign_flip(np.bincount(groups, gain_n).astype(float))
        gain[name] = better - worse if groups is None else float(gain_n.sum())
    adjusted = holm(p)
    return any(adjusted[name] <= 1 - LEVEL and gain[name] < 0 for name in rivals)


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
                        "pooled": fmean(row.pooled for row in mine),
                        "worst": fmean(row.worst for row in mine),
                        "harmed": fmean(row.harmed for row in mine),
                        "by group": fmean(row.harmed_by_groups for row in mine),
                        "served": fmean(served) if served else None,
                        "constant": fmean(row.constant or 0.0 for row in mine),
                        "bytes": fmean(row.bytes for row in mine),
                        "seeds": len(mine),
                    }
                )
    return found
