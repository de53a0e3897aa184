"""Costs of faults: a server's death, a cut connection, an idle device, a renewal; medians over repeats in real processes.

    python -m benchmarks.reliability --out benchmarks/results/reliability.json

Each figure has its name, its unit and the command that measures only it (`--only NAME`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from attune.common import aio
from attune.common.identity.credential import Credential, csr_der, fingerprint_of, key_fingerprint_of, not_after
from attune.fedserver.identity.authority import Authority
from attune.fedserver.ports.ledger import Certificate
from attune.fedserver.stores.sqlite import SqliteLedger
from benchmarks.machine import machine
from benchmarks.processes import BIN, ProcessEnded, Speaker, running
from benchmarks.rough import DOWN, UP, Cut, Proxy

PATIENCE_S = 300.0
CERTIFICATE_DAYS, AGED_DAYS = 90, 70  # a certificate of this age must be renewed
CUT_AT = 0.9
STEADY_LOOKS = 4  # checks, a second apart
HIDDEN = (4000, 250)  # widths of the model whose transfer is cut: 4 MB
FEATURES, CLASSES = 6, 3
HANDSHAKE_BYTES = 4000  # bytes before the first blob, in either direction
MLR = ("--method", "fedavg", "--model", "mlr", "--set", "train.local_epochs=1")


class Bench:
    """One federation below `work`: a server that may be killed and started again, and a fleet."""

    def __init__(self, work: Path, devices: int, flags: tuple[str, ...]) -> None:
        self.work, self.devices, self.flags = work, devices, flags
        for number in range(devices):
            _shard(work / "shards" / f"s{number:03}", number)
        self.port, self.token = 0, ""

    @contextlib.contextmanager
    def server(self) -> Iterator[Speaker]:
        home = ("--home", str(self.work / "server"), "--host", "127.0.0.1", "--port", str(self.port))
        with running("fedserver", [str(BIN / "fedserver"), *home, *self.flags], self.work) as server:
            self.port = int(server.wait_for(r"listens on 127\.0\.0\.1:(\d+)", PATIENCE_S)[1])
            self.token = (self.work / "server" / "local-token").read_text().strip()
            yield server

    @contextlib.contextmanager
    def fleet(self, port: int | None = None) -> Iterator[Speaker]:
        to = ("--server", f"127.0.0.1:{port or self.port}", "--token", self.token, "--home", str(self.work / "devices"))
        data = ("--data", f"{self.work}/shards/*", "--name", "edge", "--device", "cpu")
        with running("fedclient", [str(BIN / "fedclient"), *to, *data], self.work) as fleet:
            yield fleet

    def connected(self, server: Speaker) -> float:
        """Return the moment (time.monotonic) at which the last device had connected to this server."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            seen = {found[1]: at for at, line in list(server.lines) if (found := re.search(r"(\S+) connected ", line))}
            if len(seen) == self.devices:
                return max(seen.values())
            time.sleep(0.02)
        raise ProcessEnded(f"only {len(seen)} of {self.devices} devices connected\n{server}")

    def rounds(self) -> int:
        """Return the number of closed rounds, from the database."""
        with contextlib.closing(sqlite3.connect(f"file:{self.work}/server/state.sqlite?mode=ro", uri=True)) as db:
            [[value]] = db.execute("SELECT value FROM meta WHERE key = 'record'").fetchall()
        return int(json.loads(value).get("round", 0))


def _shard(folder: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, CLASSES, 60)
    x = (np.random.default_rng(0).normal(size=(CLASSES, FEATURES))[y] * 3 + rng.normal(size=(60, FEATURES))).astype("f4")
    folder.mkdir(parents=True)
    np.savez(folder / "train.npz", x=x[:40], y=y[:40])
    np.savez(folder / "test.npz", x=x[40:], y=y[40:])
    (folder / "meta.json").write_bytes(msgspec.json.encode({"classes": list(range(CLASSES))}))


def death(work: Path, devices: int) -> dict[str, float]:
    """Measure kill -9 of the server in the middle of a round, and a start at once."""
    bench = Bench(work, devices, (*MLR, "--min-clients", str(devices), "--rounds", "100000"))
    with ExitStack() as stack:
        server = stack.enter_context(bench.server())
        stack.enter_context(bench.fleet())
        bench.connected(server)
        server.wait_for(r" round 2/", PATIENCE_S)
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        killed, before = time.monotonic(), bench.rounds()
        again = stack.enter_context(bench.server())
        up = time.monotonic()
        again.wait_for(r" round \d+: train", PATIENCE_S)
        opened = next(at for at, line in again.lines if re.search(r" round \d+: train", line))
        first = int(again.wait_for(r" round (\d+)/\d+ closed", PATIENCE_S)[1])
        back = bench.connected(again)
    return {
        "server_listens_s": up - killed,
        "reconnect_s": back - killed,
        "next_round_s": opened - killed,
        "rounds_lost": float(before + 1 - first),
    }


def idle(work: Path, devices: int) -> dict[str, float]:
    """Measure the memory of the server with all devices connected and idle, less that of a server without devices."""
    bench = Bench(work, devices, (*MLR, "--min-clients", str(devices + 1)))
    with ExitStack() as stack:
        server = stack.enter_context(bench.server())
        before = steady_bytes(server.process.pid)  # torch is imported beside the first calls
        stack.enter_context(bench.fleet())
        bench.connected(server)
        after = steady_bytes(server.process.pid)
    return {"idle_device_kib": (after - before) / devices / 1024}


def steady_bytes(pid: int) -> int:
    """Return a process's memory once it has been the same, to a hundredth, for three seconds."""
    seen: list[int] = []
    while len(seen) < STEADY_LOOKS or max(seen[-STEADY_LOOKS:]) > 1.01 * min(seen[-STEADY_LOOKS:]):
        seen.append(_memory_bytes(pid))
        time.sleep(1)
    return seen[-1]


def _memory_bytes(pid: int) -> int:
    """Return the memory of a process that is its own and that it has written to.

    Pages of libraries are left out: whether they count as its own depends on what else runs on the machine (some MiB).
    """
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    [kib] = re.findall(r"^Private_Dirty:\s+(\d+) kB", text, re.MULTILINE)
    return int(kib) * 1024


def renewal(work: Path, devices: int) -> dict[str, float]:
    """Measure how much later devices are connected that renew their certificates first."""
    bench = Bench(work, devices, (*MLR, "--min-clients", str(devices + 1)))
    took: dict[str, float] = {}
    for kind in ("enrolment", "plain", "due"):
        if kind == "due":
            aio.run(_age(work))
        with bench.server() as server:
            began = time.monotonic()
            with bench.fleet():
                took[kind] = bench.connected(server) - began
    return {"renewal_downtime_s": (took["due"] - took["plain"]) / devices, "connect_s": took["plain"] / devices}


async def _age(work: Path) -> None:
    """Give every device an aged certificate for the key that it has."""
    authority = Authority.load(work / "server" / "ca")
    ledger = SqliteLedger(work / "server" / "state.sqlite")
    then = datetime.now(timezone.utc) - timedelta(days=AGED_DAYS)
    for folder in sorted((work / "devices").iterdir()):
        credential = Credential.load(folder / "identity")
        name = json.loads((folder / "device.json").read_text())["name"]
        pem = authority.issue_device(csr_der(credential.key_pem, name), name, CERTIFICATE_DAYS, then)
        Credential(credential.key_pem, pem).save(folder / "identity")
        certificate = Certificate(fingerprint_of(pem), name, "device", not_after(pem).timestamp())
        await ledger.enrol(name, key_fingerprint_of(pem), certificate, time.time())
    await ledger.close()


def cut(work: Path, direction: str) -> dict[str, float]:
    """Measure the bytes that travel twice if a connection is reset at nine tenths of a transfer, and the handshake's bytes."""
    wide = ("--method", "fedavg", "--model", "dnn", "--set", f"model.hidden={list(HIDDEN)}", "--set", "train.local_epochs=1")
    widths = (FEATURES, *HIDDEN, CLASSES)
    blob_bytes = 4 * sum((fan_in + 1) * fan_out for fan_in, fan_out in itertools.pairwise(widths))
    passed = []
    for number, cuts in enumerate(([], [Cut(direction, HANDSHAKE_BYTES + int(CUT_AT * blob_bytes))])):
        bench = Bench(work / str(number), 2, (*wide, "--min-clients", "2", "--rounds", "1"))
        with bench.server() as server:
            proxy = Proxy(bench.port, cuts)
            try:
                with bench.fleet(proxy.port) as fleet:
                    fleet.wait_for(r"^done: 2 of 2", PATIENCE_S, [server])
                assert not proxy.cuts, "the connection was not cut"
                passed.append(proxy.passed[direction])
            finally:
                proxy.close()
    return {f"sent_twice_{direction}_kib": (passed[1] - passed[0]) / 1024, "blob_kib": blob_bytes / 1024}


def measurements(devices: int) -> dict[str, Callable[[Path], dict[str, float]]]:
    return {
        "death": lambda work: death(work, devices),
        "idle": lambda work: idle(work, devices),
        "renewal": lambda work: renewal(work, devices),
        "cut-up": lambda work: cut(work, UP),
        "cut-down": lambda work: cut(work, DOWN),
    }


@click.command()
@click.option("--devices", type=int, default=50, show_default=True, help="Devices, hosted in one process.")
@click.option("--repeats", type=int, default=3, show_default=True)
@click.option("--only", type=click.Choice(list(measurements(1))), multiple=True)
@click.option("--out", type=click.Path(path_type=Path), default=Path("benchmarks/results/reliability.json"), show_default=True)
def main(devices: int, repeats: int, only: tuple[str, ...], out: Path) -> None:
    """Measure the costs of faults, and write medians with all values."""
    results: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    for name, measure in measurements(devices).items():
        if only and name not in only:
            continue
        where, found = machine(), list[dict[str, float]]()
        for _ in range(repeats):
            with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
                found.append(measure(Path(folder)))
        results[name] = {
            "command": f"python -m benchmarks.reliability --only {name} --devices {devices} --repeats {repeats}",
            "devices": 2 if name.startswith("cut") else devices,
            "machine": where,
            "median": {key: round(statistics.median(each[key] for each in found), 4) for key in found[0]},
            "values": [{key: round(value, 4) for key, value in each.items()} for each in found],
        }
        click.echo(f"{name}: {results[name]['median']}")
        out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
