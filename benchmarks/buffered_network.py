"""Buffered beside synchronous rounds in real processes over TLS, with devices that sleep in each batch.

`python -m benchmarks.buffered_network --out benchmarks/results/buffered_network.json` runs one server and six devices, whose
batches are 1 to 20 times slower than those of the fastest. It measures the seconds from the first order to the end of the last
round, and the accuracy of the last evaluation by all devices. The sleeps are long beside the work, so that a busy machine
changes little. A case that the file has is not run again.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from attune.common.faults import VARIABLE
from attune.fedserver.home import ServerHome
from attune.fedserver.view.homes import status_of
from attune.simulation.partition.datasets import load_dataset
from attune.simulation.partition.split import partition, write_shards
from benchmarks.machine import machine
from benchmarks.processes import federation

SLOWNESS = (1.0, 1.3, 1.8, 2.8, 6.0, 20.0)  # of each device, beside the fastest
BATCH_S = 0.06  # sleep of the fastest device after each batch
STEPS = 10  # batches of an order
SETTINGS = (f"train.local_steps={STEPS}", "train.lr=0.05", "round.evaluate_each_last=0")
DNN = ("dnn", "model.hidden=[32]")
VIT = ("vit", "model.width=16", "model.heads=2", "model.depth=1", "model.patch=4")
MODELS = {"fedavg": DNN, "fedtp": VIT, "fedmcsa": DNN}  # of each method, with its settings
CASES = {
    "synchronous": ("round.rounds=6",),
    "over-selection": ("round.rounds=24", "round.clients=4", "round.over_selection=0.5"),
    "buffered": ("round.rounds=60", "round.mode=buffered", "round.buffer=2"),
}
PATIENCE_S = 900.0


def run(method: str, case: str) -> dict[str, Any]:
    """Return seconds and accuracy of one federation."""
    model, *options = MODELS[method]
    with tempfile.TemporaryDirectory(prefix="attune-buffered-") as folder:
        work = Path(folder)
        cut = partition(load_dataset("digits"), "dirichlet", len(SLOWNESS), 0, alpha=0.3)
        shards = write_shards(work / "shards", cut)
        sleeps = zip((shard.name for shard in shards), SLOWNESS, strict=True)
        os.environ[VARIABLE] = ",".join(f"{name}:*:training=sleep:{BATCH_S * slow:g}" for name, slow in sleeps)
        heard: dict[str, float] = {}

        def hear(pid: int, at_s: float, line: str) -> None:
            if "round 1: train" in line:
                heard.setdefault("begun", at_s)
            elif re.search(r"round \d+/\d+ closed", line):
                heard["closed"] = at_s

        settings = [word for setting in (*options, *SETTINGS, *CASES[case]) for word in ("--set", setting)]
        arguments = ["--method", method, "--model", model, "--min-clients", str(len(shards)), *settings]
        home = work / "server"
        with federation(work, shards, [*arguments, "--home", str(home)], [], on_line=hear) as (server, devices):
            server.wait_for(r"(\d+)/\1 closed", PATIENCE_S, devices)
            until = time.monotonic() + PATIENCE_S
            while (status := status_of(ServerHome(home)))["state"] != "done" and time.monotonic() < until:
                time.sleep(0.5)
            if not any(line.startswith("fault: ") for _, line in devices[-1].lines):
                raise click.ClickException(f"{devices[-1]} never slept: is its name another one than {shards[-1].name}?")
        stale = [row.staleness for row in ServerHome(home).snapshot().rows if row.staleness is not None]
    return {
        "method": method,
        "case": case,
        "load_1_min": machine()["load_1_min"],
        "seconds": round(heard["closed"] - heard["begun"], 1),
        "rounds": status["round"],
        "accuracy": round(status["accuracy"]["mean_over_clients"], 4),
        "mean_staleness": round(sum(stale) / len(stale), 2) if stale else None,
    }


@click.command()
@click.option("--method", "methods", multiple=True, type=click.Choice(list(MODELS)), default=tuple(MODELS))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="File for the figures.")
def main(methods: tuple[str, ...], out: Path) -> None:
    """Run the cases that the file lacks, one after the other, and write their figures as they come."""
    measured: list[dict[str, Any]] = json.loads(out.read_bytes())["cases"] if out.exists() else []
    had = {(each["method"], each["case"]) for each in measured}
    for method in methods:
        for case in CASES:
            if (method, case) in had:
                continue
            measured.append(run(method, case))
            click.echo(str(measured[-1]), err=True)
            out.write_text(
                json.dumps({"machine": machine(), "slowness": SLOWNESS, "batch_s": BATCH_S, "cases": measured}, indent=2)
            )


if __name__ == "__main__":
    main()
