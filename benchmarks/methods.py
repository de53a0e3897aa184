"""Every method on one small task, each as a real federation: a server and a hosted fleet of ten devices with two classes each.

`python -m benchmarks.methods --out benchmarks/results/methods.csv`; a row is written as each federation ends.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from common.data.datasets import load_dataset
from common.data.partition import partition, write_shards
from common.methods.registry import names

COLUMNS = (
    "method",
    "model",
    "rounds",
    "seed",
    "mean_over_clients",
    "over_samples",
    "lowest",
    "common",
    "seconds",
    "exit_codes",
)
BIN = Path(sys.executable).parent
LISTENS = re.compile(r"listens on \S+:(\d+)")
TIMEOUT_S = 900.0


def federation(method: str, shards: Path, clients: int, rounds: int, seed: int) -> dict[str, Any]:
    """One federation to its end, or to the error that stopped it: exit codes other than 0 are part of the row."""
    home = Path(tempfile.mkdtemp(prefix="attune-methods-"))
    environment = os.environ | {"ATTUNE_HOME": str(home), "PYTHONUNBUFFERED": "1"}
    started = time.monotonic()
    command = [BIN / "fedserver", "--host", "127.0.0.1", "--port", "0", "--method", method, "--rounds", rounds]
    command += ["--min-clients", clients, "--seed", seed, "--exit-when-done"]
    with (home / "server.log").open("w") as log:
        server = subprocess.Popen([str(word) for word in command], env=environment, stdout=log, stderr=log)
    try:
        while not (found := LISTENS.search((home / "server.log").read_text())) and server.poll() is None:
            time.sleep(0.1)
        port = found.group(1) if found else "0"
        fleet = [str(BIN / "fedclient"), "--data", f"{shards}/shard*", "--server", f"localhost:{port}"]
        devices = subprocess.run(fleet, env=environment, capture_output=True, timeout=TIMEOUT_S)
        codes = f"{server.wait(60)} {devices.returncode}"
        status = subprocess.run([str(BIN / "fedserver"), "status", "--json"], env=environment, check=True, capture_output=True)
    finally:
        server.kill()
        server.wait()
    seconds = time.monotonic() - started
    shutil.rmtree(home)
    return _row(json.loads(status.stdout)) | {"method": method, "seed": seed, "seconds": round(seconds, 1), "exit_codes": codes}


def _row(status: dict[str, Any]) -> dict[str, Any]:
    accuracies, common = (
        [client[key] for client in status["clients"] if client[key] is not None] for key in ("accuracy", "accuracy_common")
    )
    over_all = status["accuracy"] or {"mean_over_clients": float("nan"), "over_samples": float("nan")}
    return {
        "model": status["model"],
        "rounds": status["round"],
        "mean_over_clients": round(over_all["mean_over_clients"], 4),
        "over_samples": round(over_all["over_samples"], 4),
        "lowest": round(min(accuracies, default=float("nan")), 4),
        "common": round(sum(common) / len(common), 4) if common else None,
    }


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--method", "methods", multiple=True, help="Only these (default: all).")
@click.option("--clients", type=click.IntRange(1), default=10, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=15, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def main(out: Path, methods: tuple[str, ...], clients: int, rounds: int, seed: int) -> None:
    """Runs the methods one after the other."""
    with tempfile.TemporaryDirectory() as folder, out.open("w", newline="", encoding="utf-8") as file:
        shards = Path(folder) / "shards"
        write_shards(shards, partition(load_dataset("digits", seed), "pathological", clients, 2, seed=seed))
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for method in methods or names():
            row = federation(method, shards, clients, rounds, seed)
            writer.writerow(row)
            file.flush()
            click.echo(row)


if __name__ == "__main__":
    main()
