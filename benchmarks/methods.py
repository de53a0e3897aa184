"""Every method on one task, each as a real federation: a server and a hosted fleet. A row is written as each federation ends.

`python -m benchmarks.methods --out benchmarks/results/methods.csv`: ten devices with two classes of digits each. With
`--shards` the task is any folder of shards; `--clients-out` writes a row for each client, too.
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
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from common.data.datasets import load_source
from common.data.partition import partition, write_shards
from common.methods.registry import names

COLUMNS = (
    "method", "model", "rounds", "seed", "clients", "mean_over_clients", "over_samples", "lowest", "common", "local", "kept",
    "seconds", "exit_codes",
)  # fmt: skip
CLIENT_COLUMNS = (
    "method", "seed", "name", "samples", "accuracy", "low", "high", "accuracy_common", "accuracy_local", "kept",
)  # fmt: skip
BIN = Path(sys.executable).parent
LISTENS = re.compile(r"listens on \S+:(\d+)")
TIMEOUT_S = 900.0


def federation(method: str, shards: Path, flags: list[str], baseline: bool) -> tuple[dict[str, Any], float, str]:
    """One federation to its end, or to the error that stopped it: (status, seconds, exit codes of server and fleet)."""
    home = Path(tempfile.mkdtemp(prefix="attune-methods-"))
    environment = os.environ | {"ATTUNE_HOME": str(home), "PYTHONUNBUFFERED": "1"}
    started = time.monotonic()
    clients = len(list(shards.glob("*/train.npz")))
    command = [str(BIN / "fedserver"), "--host", "127.0.0.1", "--port", "0", "--method", method]
    command += ["--min-clients", str(clients), "--exit-when-done", *flags]
    with (home / "server.log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        while not (found := LISTENS.search((home / "server.log").read_text())) and server.poll() is None:
            time.sleep(0.1)
        port = found.group(1) if found else "0"
        fleet = [str(BIN / "fedclient"), "--data", f"{shards}/*/", "--server", f"localhost:{port}"]
        fleet += ["--baseline", "local"] if baseline else []
        devices = subprocess.run(fleet, env=environment, capture_output=True, timeout=TIMEOUT_S)
        codes = f"{server.wait(60)} {devices.returncode}"
        status = subprocess.run([str(BIN / "fedserver"), "status", "--json"], env=environment, check=True, capture_output=True)
    finally:
        server.kill()
        server.wait()
    seconds = time.monotonic() - started
    shutil.rmtree(home)
    return json.loads(status.stdout), seconds, codes


def row_of(status: dict[str, Any]) -> dict[str, Any]:
    """A federation in one row: means over clients, and how many keep which model."""
    clients = status["clients"]

    def found(key: str) -> list[float]:
        return [client[key] for client in clients if client[key] is not None]

    def mean(key: str) -> float | None:
        return round(sum(found(key)) / len(found(key)), 4) if found(key) else None

    kept = Counter(client["kept"] for client in clients if client["kept"])
    return {
        "method": status["method"],
        "model": status["model"],
        "rounds": status["round"],
        "clients": len(clients),
        "mean_over_clients": mean("accuracy"),
        "over_samples": round(status["accuracy"]["over_samples"], 4) if status["accuracy"] else None,
        "lowest": round(min(found("accuracy")), 4) if found("accuracy") else None,
        "common": mean("accuracy_common"),
        "local": mean("accuracy_local"),
        "kept": " ".join(f"{name}:{count}" for name, count in sorted(kept.items())),
    }


def client_rows(status: dict[str, Any]) -> list[dict[str, Any]]:
    """Each client of a federation, its accuracy with the 95 % interval."""
    rows = []
    for client in status["clients"]:
        low, high = client["interval"] or (None, None)
        named = {name: client[name] for name in ("name", "samples", "accuracy", "accuracy_common", "accuracy_local", "kept")}
        rows.append({"method": status["method"], "low": low, "high": high} | named)
    return [{name: round(v, 4) if isinstance(v, float) else v for name, v in row.items()} for row in rows]


@contextmanager
def table(out: Path | None, columns: tuple[str, ...]) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Writes rows as they come; nowhere without `out`."""
    with (out or Path(os.devnull)).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()

        def write(row: dict[str, Any]) -> None:
            writer.writerow(row)
            file.flush()

        yield write


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--clients-out", type=click.Path(path_type=Path), help="A CSV with a row for each client.")
@click.option("--shards", type=click.Path(path_type=Path, exists=True), help="A folder of shards, instead of digits.")
@click.option("--method", "methods", multiple=True, help="Only these (default: all).")
@click.option("--rounds", type=click.IntRange(1), default=15, show_default=True)
@click.option("--seed", "seeds", type=int, multiple=True, default=(0,), show_default=True)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="As of fedserver, for every method.")
@click.option("--baseline", is_flag=True, help="Each device also trains a local model, for comparison.")
def main(
    out: Path,
    clients_out: Path | None,
    shards: Path | None,
    methods: tuple[str, ...],
    rounds: int,
    seeds: tuple[int, ...],
    settings: tuple[str, ...],
    baseline: bool,
) -> None:
    """Runs the methods one after the other."""
    with (
        tempfile.TemporaryDirectory() as folder,
        table(out, COLUMNS) as write,
        table(clients_out, CLIENT_COLUMNS) as write_client,
    ):
        if shards is None:
            shards = Path(folder) / "shards"
            write_shards(shards, partition(load_source("digits", 0), "pathological", 10, 0, classes_per_client=2))
        for seed in seeds:
            for method in methods or names():
                flags = ["--rounds", str(rounds), "--seed", str(seed), *(w for each in settings for w in ("--set", each))]
                status, seconds, codes = federation(method, shards, flags, baseline)
                row = row_of(status) | {"seed": seed, "seconds": round(seconds, 1), "exit_codes": codes}
                write(row)
                for client in client_rows(status):
                    write_client(client | {"seed": seed})
                click.echo(row)


if __name__ == "__main__":
    main()
