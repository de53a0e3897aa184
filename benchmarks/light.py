"""Devices of each kind on a small machine: `python -m benchmarks.light --out FILE`.

A light device, one with a small variant and a full one are in one federation on a table, over mutual TLS. The light one has
an environment of its own, with `attune-fl[light]` alone, whose size on disk is measured. Each process may use one thread, and
1 GB of memory (RLIMIT_DATA), as on a small Raspberry Pi. Memory is that of all processes of a device together: the peak until
all rounds are closed (VmHWM), and the resident memory of a device that waits, which may rest. `start_s` is the time until it is
enrolled, and `round_s` its work by its own clock, of training and evaluation, over the number of rounds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from attune.fedserver.home import ServerHome
from benchmarks.machine import machine
from benchmarks.processes import BIN, REPOSITORY, START_S, Speaker, running
from benchmarks.usage import status_bytes, tree

LIMIT_BYTES, ROUNDS, REST_S, LOOK_S = 1_000_000_000, 5, 5.0, 0.02
SAMPLES, FEATURES, CLASSES = 1_000, 20, 3
KINDS = ("light", "small", "full")
SETTINGS = (
    "method.name=fedavg", "model.name=dnn", "model.hidden=[512,256]",
    "model.variant=[{name='small', hidden=[64]}]", f"round.rounds={ROUNDS}",
    "round.min_clients=3", "server.threads=1",
)  # fmt: skip
ONE_THREAD = ("env", "OMP_NUM_THREADS=1", "OPENBLAS_NUM_THREADS=1")
LIMITED = ("bash", "-c", f'ulimit -d {LIMIT_BYTES // 1024}; exec "$@"', "limited")


def light_environment(folder: Path) -> dict[str, int]:
    """Install attune-fl[light] into a new environment, and return how many MB its packages have on disk."""
    venv.create(folder)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*pip, "--constraint", "constraints.txt", ".[light]"], cwd=REPOSITORY, check=True)
    packages = next(folder.glob("lib/python3*/site-packages"))
    sizes: dict[str, int] = {}
    for path in packages.rglob("*"):
        if path.is_file():
            top = path.relative_to(packages).parts[0]
            sizes[top] = sizes.get(top, 0) + path.stat().st_blocks * 512
    largest = sorted(sizes, key=lambda top: -sizes[top])[:6]
    return {"all": round(sum(sizes.values()) / 1e6)} | {top: round(sizes[top] / 1e6) for top in largest}


def shard(folder: Path, seed: int) -> Path:
    """Write a table of noisy classes."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, CLASSES, SAMPLES + 200)
    x = (np.random.default_rng(0).normal(size=(CLASSES, FEATURES))[y] + rng.normal(size=(len(y), FEATURES))).astype("f4")
    folder.mkdir()
    for part, rows in (("train", slice(SAMPLES)), ("test", slice(SAMPLES, None))):
        np.savez(folder / f"{part}.npz", x=x[rows], y=y[rows])
    (folder / "meta.json").write_text(json.dumps({"standardise": "federation"}))
    return folder


def memory_mb(device: Speaker, key: str) -> float:
    """Return the sum of VmRSS or VmHWM over the processes of a device."""
    total = 0
    for pid in tree(device.process.pid):
        with suppress(OSError, KeyError):  # the process has ended
            total += status_bytes(pid, key)
    return total / 1e6


def measured(work: Path, python: Path) -> Mapping[str, Mapping[str, float]]:
    """Run the federation, and return the figures of each kind."""
    rows: dict[str, dict[str, float]] = {kind: {"peak_mb": 0.0} for kind in KINDS}
    over = threading.Event()

    def watch(devices: Mapping[str, Speaker]) -> None:
        while not over.wait(LOOK_S):
            for kind, device in list(devices.items()):
                with suppress(OSError, KeyError):  # the process has ended
                    rows[kind]["peak_mb"] = max(rows[kind]["peak_mb"], round(memory_mb(device, "VmHWM"), 1))

    with ExitStack() as stack:
        flags = [word for setting in SETTINGS for word in ("--set", setting)]
        serving = [
            str(BIN / "fedserver"),
            "--port",
            "0",
            "--host",
            "127.0.0.1",
            "--join-uses",
            "9",
            "--dashboard",
            "off",
            *flags,
        ]
        server = stack.enter_context(running("fedserver", serving, work))
        port = int(server.wait_for(r"listens on 127\.0\.0\.1:(\d+)", START_S).group(1))
        token = server.wait_for(r"--token (\S+)", 10).group(1)
        devices: dict[str, Speaker] = {}
        stack.callback(over.set)
        threading.Thread(target=watch, args=(devices,), daemon=True).start()
        for seed, kind in enumerate(KINDS):
            command = [str((python.parent if kind == "light" else BIN) / "fedclient")]
            own = ["--variant", kind] if kind == "small" else []
            common = ["--server", f"127.0.0.1:{port}", "--token", token, "--name", kind, "--rest", str(REST_S), "--stay"]
            told = ["--disclose", "statistics", "--disclose", "sums", "--data", str(shard(work / kind, seed))]
            begun = time.monotonic()
            arguments = [*ONE_THREAD, *LIMITED, *command, *common, *told, *own]
            devices[kind] = stack.enter_context(running(f"fedclient {kind}", arguments, work))
            devices[kind].wait_for("^enrolled as", START_S)
            rows[kind]["start_s"] = round(time.monotonic() - begun, 1)
        for device in devices.values():
            device.wait_for("waiting for the next run", 600)
        over.set()
        time.sleep(REST_S + 10)
        for kind, device in devices.items():
            rows[kind]["waiting_mb"] = round(memory_mb(device, "VmRSS"), 1)
        reports = [msgspec.structs.asdict(row) for row in ServerHome(work / "server").snapshot().rows]
        for kind in KINDS:
            mine = [row for row in reports if row["client"] == kind]
            rows[kind]["round_s"] = round(sum(row["seconds"] for row in mine) / ROUNDS, 2)
            rows[kind]["accuracy_kept"] = [row["accuracy_kept"] for row in mine if row["work"] == "evaluate"][-1]
    return rows


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The file of results.")
@click.option("--python", type=click.Path(path_type=Path), help="Interpreter of a light environment that exists.")
def main(out: Path, python: Path | None) -> None:
    """Measure the three kinds of devices."""
    with tempfile.TemporaryDirectory() as folder:
        disk: dict[str, Any] = {}
        if python is None:
            disk, python = light_environment(Path(folder) / "light"), Path(folder) / "light" / "bin" / "python"
        (work := Path(folder) / "work").mkdir()
        rows = measured(work, python)
    task = {"samples": SAMPLES, "features": FEATURES, "classes": CLASSES, "rounds": ROUNDS, "limit_bytes": LIMIT_BYTES}
    results = {"machine": machine(), "task": task, "disk_mb": disk, "devices": rows}
    out.write_text(json.dumps(results, indent=1) + "\n")
    click.echo(json.dumps(results))


if __name__ == "__main__":
    main()
