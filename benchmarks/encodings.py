"""Accuracy against bytes: the same federations with each encoding, and a count of every byte that passed the sockets.

`python -m benchmarks.encodings --fashion fashion_mnist.npz --out benchmarks/results/encodings.csv`. It uses real processes over
mutual TLS, with all devices in one fleet. The proxy of benchmarks.rough between server and fleet counts TLS, HTTP/2 and all
control messages in both directions. Rows that the file has are not measured again.
"""

from __future__ import annotations

import csv
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.federation import Home
from benchmarks.result_file import table
from benchmarks.rough import DOWN, UP, Proxy

ENCODINGS: dict[str, tuple[str, ...]] = {  # settings of each row, by its name
    "": (),
    "bf16": ("round.encoding=bf16",),
    "int8": ("round.encoding=int8",),
    "zstd": ("round.encoding=zstd",),
    "int8 up, zstd down": ("round.encoding=int8", "round.served=zstd"),
}
COLUMNS = ("task", "encoding", "seed", "rounds", "accuracy", "up_bytes", "down_bytes", "blobs_up_bytes", "seconds")
END_S = 120.0  # longest time from the fleet's end to the server's


@dataclass(frozen=True)
class Task:
    """Task of the benchmark.

    Attributes:
        method: The method and its model.
        partition: Options of `fedclient partition` without the data set.
    """

    name: str
    fashion: bool
    partition: tuple[str, ...]
    flags: tuple[str, ...]
    clients: int
    rounds: int


TASKS = (
    Task(
        "Fashion-MNIST, dnn, fedavg, Dirichlet 0.3",
        True,
        ("--scheme", "dirichlet", "--alpha", "0.3"),
        (
            *("--method", "fedavg", "--model", "dnn", "--set", "model.hidden=[200]"),
            *("--set", "train.local_steps=10", "--set", "train.batch_size=32"),
        ),
        10,
        30,
    ),
    Task(
        "digits, vit, fedtp, two classes",
        False,
        ("--scheme", "pathological", "--classes-per-client", "2"),
        ("--method", "fedtp", "--model", "vit", "--set", "train.local_steps=10"),
        10,
        20,
    ),
)


def measure(task: Task, encoding: str, seed: int, shards: Path) -> dict[str, Any]:
    """Run one federation to its end.

    Raises:
        RuntimeError: A process has failed. The message has its output.
    """
    with tempfile.TemporaryDirectory(prefix="attune-encodings-") as folder:
        home, began = Home(Path(folder)), time.monotonic()
        flags = (*task.flags, "--rounds", task.rounds, "--seed", seed, "--min-clients", task.clients, "--exit-when-done")
        settings = [flag for setting in ENCODINGS[encoding] for flag in ("--set", setting)]
        with home.server(*flags, *settings, "--dashboard", "off") as (address, process):
            proxy = Proxy(int(address.rpartition(":")[2]))
            try:
                token = home.run("fedserver", "token", "--uses", task.clients).split()[-1]
                home.run("fedclient", "--data", f"{shards}/*/", "--server", f"localhost:{proxy.port}", "--token", token)
                code = process.wait(END_S)
            except subprocess.TimeoutExpired as error:
                raise RuntimeError(f"{error}: {home.log()}") from None
            finally:
                proxy.close()
            if code:
                raise RuntimeError(f"server, exit code {code}: {home.log()}")
        seconds = time.monotonic() - began
        blobs_up = sum(int(row["bytes_up"] or 0) for row in home.metrics())
        measured = (
            round(home.status()["accuracy"]["over_samples"], 4),
            proxy.passed[UP],
            proxy.passed[DOWN],
            blobs_up,
            round(seconds, 1),
        )
        return dict(zip(COLUMNS, (task.name, encoding, seed, task.rounds, *measured), strict=True))


def done(out: Path) -> set[tuple[str, str, str]]:
    if not out.exists():
        return set()
    with out.open(newline="", encoding="utf-8") as file:
        return {(row["task"], row["encoding"], row["seed"]) for row in csv.DictReader(file)}


@click.command()
@click.option("--fashion", type=click.Path(path_type=Path, exists=True), help="Fashion-MNIST in a form of docs/data.md.")
@click.option("--seeds", default=2)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
def main(fashion: Path | None, seeds: int, out: Path) -> None:
    """Append a row to --out as each federation ends. Without --fashion, only the digits are used."""
    finished = done(out)
    chosen = [(task, seed) for seed in range(seeds) for task in TASKS if fashion or not task.fashion]
    with table(out, COLUMNS, append=True) as write:
        for task, seed in chosen:
            left = [encoding for encoding in ENCODINGS if (task.name, encoding, str(seed)) not in finished]
            with tempfile.TemporaryDirectory(prefix="attune-encodings-") as folder:
                shards, data = Path(folder) / "shards", str(fashion) if task.fashion else "digits"
                cut = ("--dataset", data, *task.partition, "--clients", task.clients, "--seed", seed, "--out", shards)
                if left:
                    Home(Path(folder)).run("fedclient", "partition", *cut)
                for encoding in left:
                    row = measure(task, encoding, seed, shards)
                    write(row)
                    click.echo(" ".join(map(str, row.values())))


if __name__ == "__main__":
    main()
