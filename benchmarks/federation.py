"""Real federations for benchmarks: a server and hosted fleets in processes of their own, below one folder."""

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from attune.common.config import parse_assignment
from benchmarks.recipes.run import Right, right_of

BIN = Path(sys.executable).parent
# Begins the names of a hosted fleet's devices, before the shard's. Without it names, and so random draws, are new in every run.
FLEET = "fleet"
LISTENS = re.compile(r"listens on \S+:(\d+)")
TIMEOUT_S, LOOK_S = 7200.0, 0.1
CLIENT_COLUMNS = (
    "method",
    "seed",
    "name",
    "samples",
    "accuracy",
    "low",
    "high",
    "accuracy_common",
    "accuracy_local",
    "accuracy_constant",
    "kept",
)


class Home:
    """Processes of one federation below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"ATTUNE_HOME": str(folder), "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}

    def __repr__(self) -> str:
        return f"Home({self.folder})"

    def run(self, *words: object) -> str:
        """Run a command to its end, and return its standard output.

        Raises:
            RuntimeError: The command has failed. The message has its standard error.
        """
        command = [str(BIN / str(words[0])), *map(str, words[1:])]
        try:
            done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(str(error)) from None
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
        return done.stdout

    @contextmanager
    def server(self, *flags: object) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
        """Run the server during the block, and yield its address and process.

        Raises:
            RuntimeError: The server does not start. The message has its log.
        """
        command = [str(BIN / "fedserver"), "--host", "127.0.0.1", "--port", "0", *map(str, flags)]
        with (self.folder / "server.log").open("w") as log:
            process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)
        try:
            while not (found := LISTENS.search(self.log())):
                if process.poll() is not None:
                    raise RuntimeError(self.log())
                time.sleep(LOOK_S)
            yield f"localhost:{found.group(1)}", process
        finally:
            process.terminate()
            process.wait()

    def log(self) -> str:
        """Return the log of the server."""
        return (self.folder / "server.log").read_text()

    def status(self) -> dict[str, Any]:
        """Return the object that `fedserver status --json` prints."""
        return dict(json.loads(self.run("fedserver", "status", "--json")))

    def export(self) -> Path:
        """Return the folder that `fedserver export` writes."""
        out = self.folder / "export"
        self.run("fedserver", "export", "--out", out)
        return out

    def metrics(self) -> list[dict[str, str]]:
        """Return the rows of metrics.csv."""
        return list(csv.DictReader((self.export() / "metrics.csv").read_text().splitlines()))


@dataclass(frozen=True)
class Ended:
    """A federation that ran to its end: `fedserver status --json`, summary.json, and its time.

    In a simulation, `right` says for each device which labels of its test part its final model finds.
    """

    status: dict[str, Any]
    summary: dict[str, Any]
    seconds: float
    right: Callable[[], Right] = dict


def federation(method: str, shards: Path, flags: Sequence[str], baseline: bool = False) -> Ended:
    """Run one federation of all shards below a folder.

    Raises:
        RuntimeError: The server or the fleet has failed. The message has its output.
    """
    home = Home(Path(tempfile.mkdtemp(prefix="attune-benchmark-")))
    started = time.monotonic()
    clients = len(list(shards.glob("*/train.npz")))
    try:
        with home.server("--method", method, "--min-clients", clients, "--exit-when-done", *flags) as (address, process):
            rivals = ("--baseline", "local") if baseline else ()
            try:
                disclosed = ("--disclose", "statistics", *rivals)
                home.run("fedclient", "--data", f"{shards}/*/", "--name", FLEET, "--server", address, *disclosed)
                code = process.wait(timeout=60)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                raise RuntimeError(f"{error}\nserver, exit code {process.poll()}: {home.log()}") from None
            if code:
                raise RuntimeError(f"server, exit code {code}: {home.log()}")
        seconds = time.monotonic() - started
        return Ended(home.status(), json.loads((home.export() / "summary.json").read_text()), seconds)
    finally:
        shutil.rmtree(home.folder)


def simulated(
    method: str,
    shards: Path,
    settings: Sequence[str],
    rounds: int,
    seed: int,
    baseline: bool = False,
    executor: Literal["sequential", "stacked"] = "stacked",
    device: str = "cpu",
    home: Path | None = None,
) -> Ended:
    """Run the same federation in this process, without a network. With a home, an interrupted run continues.

    Devices have their shards' names without the fleet's, so their random draws differ from those over the network.
    """
    import attune

    given = {".".join(path): value for path, value in map(parse_assignment, settings)}
    started = time.monotonic()
    result = attune.simulate(
        f"{shards}/*/",
        method=method,
        rounds=rounds,
        seed=seed,
        settings=given,
        baseline="local" if baseline else None,
        executor=executor,
        device=device,
        home=home,
        progress=False,
    )
    seconds = time.monotonic() - started
    paths = sorted(path.parent for path in shards.glob("*/train.npz"))
    return Ended(result.status, result.summary, seconds, lambda: right_of(result, paths))


def client_rows(status: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each client of a federation: its accuracy with the 95 % interval. Names are those of the shards."""
    rows = []
    for client in status["clients"]:
        low, high = client["interval"] or (None, None)
        named = {name: client[name] for name in CLIENT_COLUMNS if name in client}
        shard = client["name"].removeprefix(f"{FLEET}-")
        rows.append(named | {"method": status["method"], "name": shard, "low": low, "high": high})
    return [{name: round(v, 4) if isinstance(v, float) else v for name, v in row.items()} for row in rows]
