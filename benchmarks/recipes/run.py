"""Runs of a recipe: a CSV row for each point, seed and method, with a manifest. An interrupted run continues.

The models that devices end with are compared on the devices' test parts. A device is harmed if its model is worse than the
ordinary one that it fits alone, or than what Local or FedAvg leave it, by the exact paired test with Holm's correction.
"""

from __future__ import annotations

import csv
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from attune.common.metrics import KEPT_RIVALS
from attune.common.statistics import LEVEL, Pair, holm, mcnemar, pairs_of
from attune.common.text import converted
from attune.fedclient.data.shard import Shard, load_shard
from attune.fedclient.work.comparison import sign_flip
from attune.simulation.manifest import ResultManifest
from attune.simulation.partition.samples import Source
from attune.simulation.result import SimulationResult
from attune.simulation.simulate import simulate
from benchmarks.recipes.catalogue import ALONE, CLOSED_FORM, FEDAVG, RIVALS, Recipe, RecipeMethod, RecipePoint
from benchmarks.recipes.site_tables import SiteTables

Groups = npt.NDArray[np.intp]
# For each device, which test labels its model predicts: (n,), or (n, T); in regression the score of each sample, (n,).
Right = dict[str, npt.NDArray[Any]]
SCORE = {"train.score": "accuracy"}  # whatever the classes, so that the rows of all recipes are of one score
EXECUTOR: Final = "stacked"  # chosen by a clock it would change the rounding, which changes what devices keep by points


class RecipeRow(msgspec.Struct, frozen=True):
    """Result of one method at one point with one seed. Accuracies are those of the models that devices end with.

    Attributes:
        mean: Mean over devices; in regression of R2, by the variance of the federation.
        judged: Mean accuracy by the method's own protocol.
        served: Mean accuracy of what the server sends, before any training on the device (simulation.result.DeviceRow).
        bytes: Bytes that a device sent and received in all rounds.
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
    harmed: float  # share of the devices, taking all test samples for independent
    harmed_by_groups: float  # likewise, counting each group of test samples once; equal to `harmed` without groups
    bytes: int
    seconds: float
    mse: float | None = None  # in regression the mean squared error over all test samples, in the unit of y


def run(
    recipe: Recipe, data: str | None, out: Path, say: Callable[[str], None], seeds: Sequence[int] = (), only: Sequence[str] = ()
) -> list[RecipeRow]:
    """Run what is missing in out/NAME.csv, and return all rows of the recipe.

    Each point that is run adds a line to out/NAME.manifest.jsonl: what its rows were made with.

    Args:
        recipe: The recipe.
        data: Path of its data set, if it is not bundled.
        out: Folder of the files.
        say: Receives a line for each point.
        seeds: Seeds of the cuts and of the methods; empty: those of the recipe.
        only: Labels of the entries to run; empty: all.

    Raises:
        AttuneError: As in load_source, partition and simulate.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{recipe.name}.csv"
    rows = read(path)
    for seed in seeds or recipe.seeds:
        source = recipe.load(data, seed)
        for point in recipe.points:
            there = {row.method for row in rows if (row.series, row.x, row.seed) == (point.series, point.x, seed)}
            left = [entry for entry in recipe.entries if entry.label not in there and (not only or entry.label in only)]
            if left:
                say(f"{recipe.title}: {point.series} {recipe.axis} {point.x:g}, seed {seed}")
                made, manifest = _point(recipe, left, point, source, seed, say)
                with (out / f"{recipe.name}.manifest.jsonl").open("ab") as file:
                    place = {"series": point.series, "x": point.x}
                    file.write(msgspec.json.encode(place | msgspec.structs.asdict(manifest)) + b"\n")
                write(path, made)
                rows += made
    return rows


def _point(
    recipe: Recipe, entries: Sequence[RecipeMethod], point: RecipePoint, source: Source | SiteTables, seed: int,
    say: Callable[[str], None],
) -> tuple[list[RecipeRow], ResultManifest]:  # fmt: skip
    """Run these entries on the same shards. Return their rows, and what they were made with.

    Rivals run with them, to see which devices are harmed.
    """
    with tempfile.TemporaryDirectory(prefix="attune-recipe-") as folder:
        shards = point.write(Path(folder) / "shards", source, seed)
        results: dict[str, tuple[RecipeMethod, SimulationResult, float]] = {}
        needed = RIVALS if any(entry.label != ALONE for entry in entries) else ()
        for entry in recipe.entries:
            if entry not in entries and entry.label not in needed:
                continue
            began = time.monotonic()
            result = trained(recipe, entry, shards, seed)
            results[entry.label] = entry, result, time.monotonic() - began
            if over := result.status["auroc"]:
                say(f"{entry.label}: what devices keep, {over['words']}")
        right = {label: right_of(result, shards) for label, (_, result, _) in results.items() if label != ALONE}
        tests = {shard.name: load_shard(shard) for shard in shards}
        asked = [result for result in results.values() if result[0] in entries]
        manifest = msgspec.structs.replace(asked[0][1].manifest, method=", ".join(entry.label for entry, *_ in asked))
        rows = [
            _row_alone(point, seed, result, seconds)
            if entry.label == ALONE
            else _row(point, seed, entry, result, seconds, right, tests)
            for entry, result, seconds in asked
        ]
        return rows, manifest


def trained(recipe: Recipe, entry: RecipeMethod, shards: Sequence[Path], seed: int) -> SimulationResult:
    """Run a method of a recipe on these shards. The closed form has a model and rounds of its own."""
    is_closed = entry.method == CLOSED_FORM.method
    settings = {**SCORE, **({} if is_closed else recipe.settings), **entry.settings}
    rounds = None if is_closed else 1 if entry.label == ALONE else recipe.rounds
    names, table = [str(shard) for shard in shards], {"standardise": recipe.standardise}
    return simulate(
        names, entry.method, None, rounds, seed, settings, entry.baseline, table=table, executor=EXECUTOR, progress=False
    )


def decide(recipe: Recipe, data: str | None, page: Path, seed: int = 0) -> dict[str, Any]:
    """Write the page to decide by (`fedserver report`) about FedAvg at the recipe's first point, and return what it says.

    The plan chooses the score: AUROC where events are rare at most sites. Arguments and errors are those of `run`.
    """
    with tempfile.TemporaryDirectory(prefix="attune-recipe-") as folder:
        shards = recipe.points[0].write(Path(folder) / "shards", recipe.load(data, seed), seed)
        fedavg = next(entry for entry in recipe.entries if entry.label == FEDAVG)
        result = trained(recipe, replace(fedavg, settings={**fedavg.settings, "train.score": "auto"}), shards, seed)
        result.report(page, recipe.title)
    results = Counter(client["verdict"] or "none" for client in result.status["clients"])
    pooled = result.status["auroc"]
    return {"recipe": recipe.name, "score": result.status["metric"], "results": results, "pooled": pooled}


def right_of(result: SimulationResult, shards: Sequence[Path]) -> Right:
    """Return for each device which labels of its test part its final model predicts, or the score of each sample."""
    return {shard.name: result.model(shard.name).right(load_shard(shard)).numpy() for shard in shards}


def squared_error(result: SimulationResult, tests: Mapping[str, Shard]) -> float:
    """Return the mean squared error over all test samples of what devices keep, by the shard of each device."""
    errors = [
        np.square(np.ravel(result.model(name).predict(shard.test_x)) - np.ravel(shard.test_y))
        for name, shard in tests.items()
        if len(shard.test_y)
    ]
    return float(np.concatenate(errors).mean())


def _row(
    point: RecipePoint, seed: int, entry: RecipeMethod, result: SimulationResult, seconds: float, right: Mapping[str, Right],
    tests: Mapping[str, Shard],
) -> RecipeRow:  # fmt: skip
    mine, clients = right[entry.label], result.status["clients"]
    against_alone = {client["name"]: _against_alone(client) for client in clients}
    rivals = {name: right[name] for name in RIVALS if name != entry.label and name in right}
    rivals_of = {device: {rival: by_device[device] for rival, by_device in rivals.items()} for device in mine}
    accuracies = [float(right_n.mean()) for right_n in mine.values()]

    def mean_of(key: str) -> float | None:
        known = [client[key] for client in clients if client[key] is not None]
        return round(fmean(known), 4) if known else None

    return RecipeRow(
        series=point.series,
        x=point.x,
        seed=seed,
        method=entry.label,
        devices=len(mine),
        samples=round(fmean(client["samples"] for client in clients), 1),
        mean=round(fmean(accuracies), 4),
        pooled=round(float(np.concatenate([right_n.reshape(-1) for right_n in mine.values()]).mean()), 4),
        worst=round(min(accuracies), 4),
        judged=mean_of("accuracy"),
        served=_mean_or_none([row.served for row in result.table()]),
        constant=mean_of("accuracy_constant"),
        harmed=round(fmean(harmed(mine[name], rivals_of[name], None, against_alone[name]) for name in mine), 4),
        harmed_by_groups=round(
            fmean(harmed(mine[name], rivals_of[name], tests[name].test_places, against_alone[name]) for name in mine), 4
        ),
        bytes=result.bytes_moved // len(mine),
        seconds=round(seconds, 1),
        mse=round(squared_error(result, tests), 2) if result.task == "regression" else None,
    )


def _row_alone(point: RecipePoint, seed: int, result: SimulationResult, seconds: float) -> RecipeRow:
    """Return the row of the ordinary models that devices fit alone. It is the rival of all others, so nobody is harmed."""
    clients = [client for client in result.status["clients"] if client["accuracy_alone"] is not None]
    scores, samples = ([client[name] for client in clients] for name in ("accuracy_alone", "test_samples"))
    pooled = float(np.average(scores, weights=samples))
    scale = result._plan.targets
    return RecipeRow(
        series=point.series,
        x=point.x,
        seed=seed,
        method=ALONE,
        devices=len(clients),
        samples=round(fmean(client["samples"] for client in clients), 1),
        mean=round(fmean(scores), 4),
        pooled=round(pooled, 4),
        worst=round(min(scores), 4),
        judged=None,
        served=None,
        constant=round(fmean(client["accuracy_constant"] for client in clients), 4),
        harmed=0.0,
        harmed_by_groups=0.0,
        bytes=0,
        seconds=round(seconds, 1),
        mse=None if scale is None else round((1 - pooled) * scale.std[0] ** 2, 2),
    )


def _against_alone(client: Mapping[str, Any]) -> Pair | None:
    """Return a device's comparison of what it keeps with its ordinary model alone, if it made one."""
    return next((pair for pair in pairs_of(client, KEPT_RIVALS) if pair.rival == "alone"), None)


def _mean_or_none(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(fmean(known), 4) if known and len(known) == len(values) else None


def harmed(
    mine: npt.NDArray[Any], rivals: Mapping[str, npt.NDArray[Any]], groups: Groups | None = None, alone: Pair | None = None
) -> bool:
    """Return whether a device's model is worse than a rival's by more than chance. Equal models are called so in at most 5 %.

    Args:
        mine: Which test labels the device's model predicts, (n,) or (n, T), or the score of each sample, (n,).
        rivals: The same for each rival.
        groups: Number of each test sample's group, (n,). A group counts once.
        alone: Comparison with the ordinary model that the device fits alone, if there is one.
    """
    p, gain = ({}, {}) if alone is None else ({ALONE: alone.p}, {ALONE: alone.difference})
    for name, theirs in rivals.items():
        gain_n = (mine.astype(float) - theirs.astype(float)).reshape(len(mine), -1).mean(axis=1)
        better, worse = int((gain_n > 0).sum()), int((gain_n < 0).sum())
        counted = groups is None and mine.dtype == np.bool_
        by_group = gain_n if groups is None else np.bincount(groups, gain_n).astype(float)
        p[name] = mcnemar(better, worse) if counted else sign_flip(by_group)
        gain[name] = better - worse if counted else float(gain_n.sum())
    adjusted = holm(p)
    return any(adjusted[name] <= 1 - LEVEL and gain[name] < 0 for name in p)


def read(path: Path) -> list[RecipeRow]:
    """Return the rows of a file that `write` made; empty if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        plain = [{key: value or None for key, value in row.items()} for row in csv.DictReader(file)]
    return [converted({**row, "series": row["series"] or ""}, RecipeRow, strict=False) for row in plain]


def write(path: Path, rows: Sequence[RecipeRow]) -> None:
    """Append the rows of a point to the file. A file of an earlier version keeps its columns."""
    columns = list(RecipeRow.__struct_fields__)
    if goes_on := path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            columns = next(csv.reader(file))
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        if not goes_on:
            writer.writeheader()
        writer.writerows(msgspec.to_builtins(row) for row in rows)


def shown(recipe: Recipe, rows: Sequence[RecipeRow]) -> dict[str, list[dict[str, Any]]]:
    """Return means over seeds for each series: a row for each point and method, in the recipe's order."""
    means: dict[str, list[dict[str, Any]]] = {}
    for point in recipe.points:
        for entry in recipe.entries:
            mine = [row for row in rows if (row.series, row.x, row.method) == (point.series, point.x, entry.label)]
            if mine:
                judged = [row.judged for row in mine if row.judged is not None]
                served = [row.served for row in mine if row.served is not None]
                means.setdefault(point.series, []).append(
                    {
                        "x": point.x,
                        "method": entry.label,
                        **{name: fmean(getattr(row, name) for row in mine) for name in ("mean", "pooled", "worst", "harmed")},
                        "by group": fmean(row.harmed_by_groups for row in mine),
                        "judged": fmean(judged) if judged else None,
                        "served": fmean(served) if served else None,
                        "constant": fmean(row.constant or 0.0 for row in mine),
                        "bytes": fmean(row.bytes for row in mine),
                        "seeds": len(mine),
                        "mse": fmean(row.mse for row in mine if row.mse is not None) if mine[0].mse is not None else None,
                    }
                )
    return means
