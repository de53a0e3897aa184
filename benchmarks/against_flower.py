"""The same exchange with Flower and with Attune in turn: the time of a round without computation, and the ratio.

Flower has an environment of its own, named by its python (`pip install flwr` there). Its processes are those of a deployment: a
SuperLink, a SuperNode for each device, and the run. It runs without TLS, signatures and a database on disk, which favours it.
Attune runs with mutual TLS, digests and syncs as always. Both start anew for every repeat, in turn, so that other work on the
machine affects both.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from benchmarks.machine import machine
from benchmarks.processes import ProcessEnded, Speaker, running
from benchmarks.round import Case, measure

APP = Path(__file__).parent / "flower"
ROUND = re.compile(r"freight-round \d+ ([\d.]+)")
READY_S, RUN_S, LOOK_S = 180.0, 1800.0, 0.2


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def listens(speaker: Speaker, port: int) -> None:
    """Wait until the process listens at the port.

    Raises:
        ProcessEnded: The process has ended.
    """
    until = time.monotonic() + READY_S
    while time.monotonic() < until and speaker.process.poll() is None:
        with socket.socket() as trying:
            if trying.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(LOOK_S)
    raise ProcessEnded(f"{speaker} does not listen on port {port}")


def flower_rounds_s(python: Path, case: Case) -> list[float]:
    """Return the seconds of each round after the first, by the timestamps of Flower's server.

    Raises:
        ProcessEnded: A process has ended. The message has its output.
    """
    tools, port = python.parent, free_port()
    with tempfile.TemporaryDirectory(prefix="flower-") as folder, ExitStack() as stack:
        work = Path(folder)
        stack.enter_context(_environment(work, tools))
        shutil.copytree(APP, work / "app")
        (work / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
        )
        link = [str(tools / "flower-superlink"), "--insecure", "--port", str(port), "--disable-runtime-dependency-installation"]
        server = stack.enter_context(running("superlink", link, work))
        listens(server, port)
        nodes = [stack.enter_context(running(f"supernode {index}", _node(tools, port), work)) for index in range(case.clients)]
        config = f"rounds={case.rounds + 1} clients={case.clients} parameters={case.parameters} tensors={case.tensors}"
        command = [str(tools / "flwr"), "run", str(work / "app"), "here", "--stream", "--run-config", config]
        run = stack.enter_context(running("flwr run", command, work))
        try:
            stamps = [float(run.wait_for(ROUND.pattern, RUN_S, nodes).group(1)) for _ in range(case.rounds + 1)]
        except ProcessEnded as ended:
            raise ProcessEnded(f"{ended}\n{server}\n{nodes[0]}") from None
    return [after - before for before, after in pairwise(stamps)]


def _node(tools: Path, port: int) -> list[str]:
    address = ["--superlink", f"127.0.0.1:{port}", "--port", str(free_port())]
    return [str(tools / "flower-supernode"), "--insecure", *address]


@contextmanager
def _environment(work: Path, tools: Path) -> Iterator[None]:
    """Set up an environment for Flower during the block: its own folder, its commands on the path, and no telemetry."""
    before = dict(os.environ)
    path = f"{tools}{os.pathsep}{before.get('PATH', '')}"
    os.environ.update({"FLWR_HOME": str(work), "FLWR_TELEMETRY_ENABLED": "0", "PATH": path})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def flower_version(python: Path) -> str:
    code = "from importlib.metadata import version; print(version('flwr'))"
    return subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def compare(python: Path, case: Case, repeats: int) -> dict[str, Any]:
    """Run both in turn. Return the medians over all rounds of all repeats, and the ratio of Flower's to Attune's."""
    flower: list[float] = []
    ours: list[float] = []
    for _ in range(repeats):
        flower += flower_rounds_s(python, case)
        ours.append(measure(case)["median_s"])
    medians = statistics.median(flower), statistics.median(ours)
    return {
        "clients": case.clients,
        "parameters": case.parameters,
        "tensors": case.tensors,
        "flower_median_s": round(medians[0], 3),
        "attune_median_s": round(medians[1], 4),
        "times_as_long": round(medians[0] / medians[1], 1),
        "flower_rounds_s": [round(seconds, 3) for seconds in flower],
        "attune_medians_s": ours,
    }


@click.command()
@click.option(
    "--python", type=click.Path(path_type=Path, exists=True), required=True, help="Python of an environment with flwr."
)
@click.option("--clients", default=2, show_default=True)
@click.option("--parameters", default=1_000_000, show_default=True)
@click.option("--tensors", default=8, show_default=True)
@click.option("--rounds", default=5, show_default=True, help="Measured rounds of each repeat.")
@click.option("--repeats", default=3, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="A JSON file (default: only print it).")
def main(python: Path, clients: int, parameters: int, tensors: int, rounds: int, repeats: int, out: Path | None) -> None:
    """Run the same exchange with both in turn, and print the ratio."""
    on, case = machine(), Case(clients=clients, parameters=parameters, tensors=tensors, rounds=rounds)
    found = compare(python, case, repeats) | {"flower": flower_version(python)}
    click.echo(
        f"Flower {found['flower']} {found['flower_median_s']} s, Attune {found['attune_median_s']} s a round: "
        f"{found['times_as_long']} times as long"
    )
    if out is not None:
        options = " ".join(f"--{name} {value}" for name, value in (("clients", clients), ("parameters", parameters)))
        command = f"python -m benchmarks.against_flower --python PYTHON {options} --rounds {rounds} --repeats {repeats}"
        date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        out.write_text(json.dumps({"command": command, "date": date, "machine": on} | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
