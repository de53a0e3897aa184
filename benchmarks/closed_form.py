"""Cost and weak points of `--method analytic`: many devices, many outputs, and devices whose labels are wrong.

- `devices`: a simulation of 10,000 devices from end to end, with 200 features: time, and the peak of the process.
- `outputs`: the server's part of a federation with the most outputs (1,000), from sums that are drawn.
- `school`: the server's part of both rounds with 139 schools (`--data school.npz`).
- `constants`: accuracy, or R2, with other features, on tasks that no table shows (`--out closed_form_constants.csv`).
- `sizes`: accuracy of own models with more features, at points of digits recipes (`--out closed_form_sizes.csv`).
- `flipped`: three of ten devices have the label 9 - y: what the others lose, and how far down left_out.csv they are.

Each runs by itself in a new process: `python -m benchmarks.closed_form devices --out closed_form_devices.json`.
"""

from __future__ import annotations

import csv
import resource
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import click
import msgspec
import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris, load_wine

import attune
from attune.common.exchange.transform import PartUpdate
from attune.common.methods.ridge import ERRORS, STRENGTHS, check_sums, nothing_solved, sums_of, targets_of
from attune.common.methods.settings.aggregators import ClosedFormSettings
from attune.common.wire.tensors import Tensors
from attune.fedserver.lab import checks
from attune.fedserver.lab.aggregators.closed_form import ClosedFormSums
from attune.fedserver.lab.engine import Engine
from attune.fedserver.lab.vault import StateVault
from attune.fedserver.stores.disk import scratch_blobs
from benchmarks.machine import machine
from benchmarks.recipes.catalogue import get
from benchmarks.result_file import Results

Report = dict[str, Any]
CLASSES, SAMPLES, INPUTS = 10, 40, 20  # of each of many devices; a quarter is for testing
OUTPUTS, FEATURES, OF_OUTPUTS = 1_000, 500, 20  # outputs, random features, devices
POINTS = (("digits", 40.0), ("label-shift", 0.1))
TASKS: Mapping[str, Callable[..., Any]] = {
    "wine": load_wine, "breast cancer": load_breast_cancer, "iris": load_iris, "diabetes": load_diabetes,
}  # fmt: skip
VARIANTS: Mapping[str, dict[str, Any]] = {
    "default": {},
    "width 0.25": {"model.widths": [0.25]},
    "width 1": {"model.widths": [1.0]},
    "and linear": {"model.linear": True},
    "250 features": {"model.features": 250},
    "1,000 features": {"model.features": 1000},
}
LIARS, SEEDS = 3, (0, 1, 2)  # of ten
SIZES = (500, 1_000, 2_000)
ALIKE = (("digits", 20.0), ("relatedness", 12.0), ("label-shift", 10.0), ("feature-shift", 1.0), ("feature-shift", 4.0))


def devices(number: int = 10_000, features: int = 200) -> Report:
    """Simulate a federation of very many devices: ten clouds of points."""
    draws = np.random.default_rng(0)
    centres = draws.normal(size=(CLASSES, INPUTS))
    shards = {}
    for place in range(number):
        y = draws.integers(CLASSES, size=SAMPLES)
        x = (centres[y] + draws.normal(size=(SAMPLES, INPUTS))).astype("f4")
        shards[f"device{place:05}"] = (x.reshape(SAMPLES, 4, 5, 1), y)  # images: all devices scale them alike
    before = peak_mib()
    result = attune.simulate(shards, "analytic", settings={"model.features": features}, baseline="none", progress=False)
    accuracy = round(result.table().mean("accuracy"), 4)
    return {"devices": number, "features": features, "before_mib": before, "mean_accuracy": accuracy}


def outputs() -> Report:
    """Take in the sums of some devices, close the round, and make what is served."""
    draws = torch.Generator().manual_seed(0)

    def sums() -> Tensors:
        Z_ND = torch.randn(2 * OUTPUTS, FEATURES + 1, generator=draws, dtype=torch.float64) / FEATURES**0.5
        Z_ND[:, -1] = 1
        y_N = torch.randint(OUTPUTS, (len(Z_ND),), generator=draws)
        return {
            **sums_of(Z_ND, targets_of(y_N, OUTPUTS), [FEATURES + 1]),
            ERRORS: torch.ones(1, len(STRENGTHS), dtype=torch.float64),
        }

    with tempfile.TemporaryDirectory() as folder, scratch_blobs(Path(folder)) as blobs:
        made = ClosedFormSums(ClosedFormSettings(), StateVault(blobs, "attended", [], 0), 0, {})
        made.start(nothing_solved(OUTPUTS, [FEATURES + 1]))
        updates = [PartUpdate(f"device{place:02}", 2.0 * OUTPUTS, sums()) for place in range(OF_OUTPUTS)]
        before = peak_mib()
        seconds = {
            "check_s": timed(lambda: check_sums(dict(updates[0].source), [FEATURES + 1], True, "device")),
            "close_s": timed(lambda: made.close_round(updates)),
            "serve_s": timed(lambda: list(made.generate([update.client for update in updates]))) / OF_OUTPUTS,
        }
    rounded = {name: round(spent, 3) for name, spent in seconds.items()}
    return {"outputs": OUTPUTS, "features": FEATURES, "devices": OF_OUTPUTS, "before_mib": before, **rounded}


def school(data: Path) -> Report:
    """Simulate School with all pupils, and count the processor time of the server's work with sums.

    `engine_s` is of all its tensor work: also the files of sums, which are read, written and hashed.
    """
    spent: dict[str, float] = dict.fromkeys(("check_s", "close_s", "serve_s", "engine_s"), 0.0)

    def counted(owner: Any, name: str, kind: str, gives: Callable[[Any], Any] = lambda made: made) -> Any:
        work = getattr(owner, name)

        def watched(*given: Any, **named: Any) -> Any:
            begun = time.thread_time()
            try:
                return gives(work(*given, **named))
            finally:
                spent[kind] += time.thread_time() - begun

        return patch.object(owner, name, watched)

    with ExitStack() as stack:
        stack.enter_context(counted(checks, "check_sums", "check_s"))
        stack.enter_context(counted(ClosedFormSums, "close_round", "close_s"))
        stack.enter_context(counted(ClosedFormSums, "generate", "serve_s", list))
        for name in ("arrive", "aggregate", "serve"):
            stack.enter_context(counted(Engine, name, "engine_s"))
        source, (*_, point) = get("school").load(str(data), 0), get("school").points
        shards = point.write(Path(stack.enter_context(tempfile.TemporaryDirectory())), source, 0)
        named = {shard.name: shard for shard in shards}
        result = attune.simulate(named, "analytic", baseline="none", progress=False)
    rounded = {name: round(seconds, 3) for name, seconds in spent.items()}
    return {"devices": len(shards), "rounds": result.status["round"], **rounded}


def constants(out: Path) -> None:
    """Score the variants on held-out rows of training parts, for each task and seed. What the file has stays."""
    results = Results(out, ("task", "seed", "variant", "score"))
    known = {(row["task"], row["seed"], row["variant"]) for row in results.rows()}
    for (task, load), seed, (variant, settings) in product(TASKS.items(), SEEDS, VARIANTS.items()):
        if (task, str(seed), variant) in known:
            continue
        x, y = load(return_X_y=True)
        kept = np.random.default_rng(seed).permutation(len(y))[len(y) // 5 :]  # a fifth is for testing, and is not read
        with tempfile.TemporaryDirectory() as folder:
            shards = {}
            for place, rows in enumerate(np.array_split(kept, 5 + 2 * seed)):
                name = f"device{place}"
                shard = shards[name] = Path(folder) / name
                shard.mkdir()
                for part, some in (("test", rows[: len(rows) // 4]), ("train", rows[len(rows) // 4 :])):
                    np.savez(shard / f"{part}.npz", x=x[some].astype("f4"), y=y[some])
                of_y = {"task": "regression"} if task == "diabetes" else {"classes": np.unique(y).tolist()}
                (shard / "meta.json").write_bytes(msgspec.json.encode({**of_y, "standardise": "federation"}))
            result = attune.simulate(shards, "analytic", settings=settings, seed=seed, baseline="none", progress=False)
            score = result.table().mean("accuracy") or 0.0
        results.add([{"task": task, "seed": seed, "variant": variant, "score": round(score, 4)}])


def sizes(out: Path) -> None:
    """Score devices' own models at each point, with five seeds and numbers of features. What the file has stays."""
    results = Results(out, ("recipe", "x", "seed", "features", "own"))
    known = {(row["recipe"], float(row["x"]), int(row["seed"]), int(row["features"])) for row in results.rows()}
    for (recipe, x), seed, features in product(ALIKE, range(5), SIZES):
        if (recipe, x, seed, features) in known:
            continue
        point = next(point for point in get(recipe).points if point.x == x)
        with tempfile.TemporaryDirectory() as folder:
            shards = point.write(Path(folder), get(recipe).load(None, seed), seed)
            settings = {"model.features": features}
            result = attune.simulate(shards, "analytic", settings=settings, seed=seed, baseline="none", progress=False)
            score = fmean(client["accuracy"] for client in result.status["clients"])
        results.add([{"recipe": recipe, "x": x, "seed": seed, "features": features, "own": round(score, 4)}])


def flipped() -> Report:
    """Run each point with and without wrong labels."""
    rows = []
    for recipe, x in POINTS:
        for seed in SEEDS:
            clean, wrong = _run(recipe, x, seed, 0), _run(recipe, x, seed, LIARS)
            rows.append({"recipe": recipe, "x": x, "seed": seed, "clean": clean, "flipped": wrong})
    return {"liars": LIARS, "rows": rows}


def _run(recipe: str, x: float, seed: int, liars: int) -> Mapping[str, Any]:
    """Return mean accuracies of the honest devices, and the places of the liars in left_out.csv (1: the first)."""
    source = get(recipe).load(None, seed)
    point = next(point for point in get(recipe).points if point.x == x)
    with tempfile.TemporaryDirectory() as folder:
        shards = point.write(Path(folder), source, seed)
        liars_drawn = {shards[place].name for place in np.random.default_rng(seed).permutation(len(shards))[:LIARS]}
        for shard in shards if liars else []:
            if shard.name in liars_drawn:
                arrays = dict(np.load(shard / "train.npz"))
                np.savez(shard / "train.npz", **(arrays | {"y": 9 - arrays["y"]}))
        named = {shard.name: shard for shard in shards}
        result = attune.simulate(named, "analytic", seed=seed, keep="personalized", baseline="none", progress=False)
        with (result.save(Path(folder) / "saved") / "left_out.csv").open(newline="") as file:
            listed = list(csv.DictReader(file))
    honest = [client for client in result.status["clients"] if client["name"] not in liars_drawn]
    report: Report = {
        "personal": round(fmean(client["accuracy"] for client in honest), 4),
        "common": round(fmean(client["accuracy_common"] for client in honest), 4),
        "largest_honest_misfit": round(max(float(row["misfit"]) for row in listed if row["client"] not in liars_drawn), 3),
    }
    if liars:
        of_liars = [place for place, row in enumerate(listed) if row["client"] in liars_drawn]
        report["places"] = [place + 1 for place in of_liars]
        report["misfits"] = [round(float(listed[place]["misfit"]), 3) for place in of_liars]
    return report


def timed(work: Callable[[], Any]) -> float:
    """Return the seconds of processor time of the work."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def peak_mib() -> int:
    """Return the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


@click.command()
@click.argument("what", type=click.Choice(["devices", "outputs", "school", "constants", "sizes", "flipped"]))
@click.option("--data", type=click.Path(path_type=Path, exists=True), help="school.npz")
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(what: str, data: Path, out: Path) -> None:
    """Measure it, and write the file."""
    torch.set_num_threads(1)
    if what in ("constants", "sizes"):
        {"constants": constants, "sizes": sizes}[what](out)
        return
    of_machine, wall, spent = machine(), time.perf_counter(), time.process_time()
    works: Mapping[str, Callable[[], Report]] = {
        "devices": devices, "outputs": outputs, "school": partial(school, data), "flipped": flipped
    }  # fmt: skip
    report = works[what]()
    spent = time.process_time() - spent
    times = {"wall_s": round(time.perf_counter() - wall, 1), "processor_s": round(spent, 1), "peak_mib": peak_mib()}
    out.write_bytes(msgspec.json.format(msgspec.json.encode({"machine": of_machine, **report, **times})) + b"\n")


if __name__ == "__main__":
    main()
