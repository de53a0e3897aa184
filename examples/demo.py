"""`make demo`: a whole federation on one machine, in real processes over mutual TLS, three times on the same shards.

FedTP, then FedAvg and Local with the same budget; ends with one row a device. Exit status 0 only if every process ended
well and every device has a model and three accuracies.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import click
import numpy as np

from attune.fedclient.partition.datasets import load_dataset
from attune.fedclient.partition.picture import table
from attune.fedclient.partition.samples import Dataset
from attune.fedclient.partition.split import partition, write_shards

METHODS = ("fedtp", "fedavg", "local")
DEVICES = 5
CLASSES_EACH = 2
BIN = Path(sys.executable).parent
LISTENS = re.compile(r"listens on \S+:(\d+)")


@dataclass
class Run:
    """What is known of one method at its end: accuracy, samples and model folder by device."""

    accuracy: dict[str, float]
    samples: dict[str, int]
    models: dict[str, Path]


class Demo:
    def __init__(self, out: Path, rounds: int, seed: int) -> None:
        self.out, self.rounds, self.seed = out, rounds, seed
        self.processes: list[subprocess.Popen[str]] = []

    def run(self, method: str, shards: list[Path], settings: Sequence[str] = ()) -> Run:
        """One server and a device a shard, to the end. Errors: click.ClickException naming the process that failed."""
        environment = os.environ | {"ATTUNE_HOME": str(self.out / method), "PYTHONUNBUFFERED": "1"}
        command = [BIN / "fedserver", "--host", "127.0.0.1", "--port", "0", "--method", method, "--rounds", str(self.rounds)]
        command += ["--min-clients", str(len(shards)), "--seed", str(self.seed), "--exit-when-done"]
        server = self._start([*command, *(word for setting in settings for word in ("--set", setting))], environment)
        port = self._port(server, method)
        devices = {}
        for shard in shards:
            command = [BIN / "fedclient", "--data", str(shard), "--server", f"localhost:{port}"]
            log = (self.out / method / f"{shard.name}.log").open("w", encoding="utf-8")
            devices[shard.name] = self._start([*command, "--name", shard.name], environment, log)
        self._wait(method, {**devices, "fedserver": server})
        return self._collect(method, shards, environment)

    def _wait(self, method: str, running: dict[str, subprocess.Popen[str]]) -> None:
        """Until all have ended well; one that has not ends the demo at once, for the others would wait for it."""
        while any(process.poll() is None for process in running.values()):
            time.sleep(0.1)
            self._check(method, running)
        self._check(method, running)

    def _check(self, method: str, running: dict[str, subprocess.Popen[str]]) -> None:
        for name, process in running.items():
            if process.poll():
                raise click.ClickException(f"{method}: {name} ended with status {process.returncode}; see {self.out / method}")

    def _start(
        self, command: Sequence[str | Path], environment: dict[str, str], log: IO[str] | int = subprocess.PIPE
    ) -> subprocess.Popen[str]:
        words = [str(word) for word in command]
        process = subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT, text=True)
        self.processes.append(process)
        return process

    def _port(self, server: subprocess.Popen[str], method: str) -> int:
        """Reads the server's first line; a thread shows the rounds from then on."""
        said = ""
        lines = iter(server.stdout or ())
        for line in lines:
            said += line
            found = LISTENS.search(line)
            if found:
                threading.Thread(target=_show, args=(lines, method), daemon=True).start()
                return int(found.group(1))
        raise click.ClickException(f"{method}: fedserver did not start: {said.strip()}")

    def _collect(self, method: str, shards: list[Path], environment: dict[str, str]) -> Run:
        command = [str(BIN / "fedserver"), "status", "--json"]
        found = json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
        homes = _homes(self.out / method / "devices")
        clients = {client["name"]: client for client in found["clients"]}
        names = [shard.name for shard in shards]
        missing = [name for name in names if clients[name]["accuracy"] is None or not (homes[name] / "model").is_dir()]
        if missing:
            raise click.ClickException(f"{method}: {', '.join(missing)} ended without a model or an accuracy")
        return Run(
            {name: clients[name]["accuracy"] for name in names},
            {name: clients[name]["samples"] for name in names},
            {name: homes[name] / "model" for name in names},
        )

    def stop(self) -> None:
        """Ends what is still running."""
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
                process.wait(10)


def _show(lines: Iterable[str], method: str) -> None:
    for line in lines:
        if line.startswith(("round", "plan", "state", "failed")) and ": train on" not in line:
            click.echo(f"[{method}] {line.rstrip()}")


def _homes(devices: Path) -> dict[str, Path]:
    """The homes below a folder by the name of their device."""
    return {json.loads(path.read_text())["name"]: path.parent for path in devices.glob("*/*/device.json")}


def shorten(dataset: Dataset, samples: int, seed: int) -> Dataset:
    """At most so many training samples (and a third as many for testing), drawn at random; everything if there are fewer."""
    draw = np.random.default_rng(seed)

    def some(count: int, limit: int) -> np.ndarray:
        return np.sort(draw.permutation(count)[:limit])

    train, test = some(len(dataset.train_y), samples), some(len(dataset.test_y), samples // 3)
    return dataset.subset(train, test)


def make_shards(data: str, out: Path, samples: int, seed: int) -> list[Path]:
    """Shards of two classes a device, or by Dirichlet 0.3 where the number of classes does not allow that."""
    full = load_dataset(data, seed)
    dataset = shorten(full, samples, seed)
    if len(dataset.train_y) < len(full.train_y):
        click.echo(f"using {len(dataset.train_y)} of {len(full.train_y)} training samples (--samples changes that)")
    classes = len(dataset.classes)
    scheme = "pathological" if classes >= CLASSES_EACH and DEVICES * CLASSES_EACH % classes == 0 else "dirichlet"
    settings = {"classes_per_client": CLASSES_EACH} if scheme == "pathological" else {"alpha": 0.3}
    parts = partition(dataset, scheme, DEVICES, seed, **settings)
    click.echo(table(parts))
    return write_shards(out, parts)


def verdict(local: float, averaged: float, own: float) -> str:
    """Whether personalization helped this device, in a word."""
    best = max(local, averaged)
    if own > best:
        return "FedTP is best"
    if own == best:
        return "FedTP is as good as the best"
    return "Local is better" if local == best else "FedAvg is better"


@click.command()
@click.option("--data", default="digits", show_default=True, help="digits, or an .npz with train_x, train_y, test_x, test_y.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("demo-out"), show_default=True, help="Emptied first.")
@click.option("--rounds", type=click.IntRange(1), default=15, show_default=True)
@click.option("--samples", type=click.IntRange(10), default=1500, show_default=True, help="Training samples of all devices.")
@click.option("--seed", type=int, default=0, show_default=True)
def main(data: str, out: Path, rounds: int, samples: int, seed: int) -> None:
    """Runs the demo."""
    started = time.monotonic()
    out = out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    shards = make_shards(data, out / "shards", samples, seed)
    demo = Demo(out, rounds, seed)
    try:
        runs = {method: demo.run(method, shards) for method in METHODS}
    finally:
        demo.stop()
    click.echo(f"\naccuracy on each device's own test data after {rounds} rounds ({time.monotonic() - started:.0f} s in all)")
    click.echo(f"{'device':<10} {'samples':>7} {'Local':>7} {'FedAvg':>7} {'FedTP':>7}  {'verdict':<28}  model")
    for shard in shards:
        name = shard.name
        local, averaged, own = (runs[method].accuracy[name] for method in ("local", "fedavg", "fedtp"))
        row = f"{name:<10} {runs['fedtp'].samples[name]:>7} {local:>7.4f} {averaged:>7.4f} {own:>7.4f}"
        click.echo(f"{row}  {verdict(local, averaged, own):<28}  {runs['fedtp'].models[name]}")


if __name__ == "__main__":
    main()
