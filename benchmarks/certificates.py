"""A federation whose certificates live for a minute: does it lose a round? It uses real processes and TLS.

    python -m benchmarks.certificates --minutes 10 --out benchmarks/results/certificates.json

A round is lost if it closed without the update of a device. Every update counts if no link breaks for longer than the round
waits, so this measures the renewal of certificates and the change of connections beside training.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from attune.common import faults
from attune.fedserver.home import ServerHome
from benchmarks.machine import machine
from benchmarks.processes import federation

DEVICES, DAYS = 3, 0.0007
BATCH_S = 0.1  # seconds that each batch pauses, so that rounds last seconds and cost little
ROUNDS = 100_000
FLAGS = ("--method", "fedavg", "--model", "mlr", "--rounds", str(ROUNDS), "--min-clients", str(DEVICES), "--join-uses", "9")


def shard(folder: Path, seed: int) -> Path:
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    for part, samples in (("train", 40), ("test", 20)):
        np.savez(folder / f"{part}.npz", x=random.normal(size=(samples, 6)).astype("f4"), y=random.integers(0, 3, samples))
    (folder / "meta.json").write_text('{"classes": [0, 1, 2]}')
    return folder


def measure(minutes: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        shards = [shard(work / f"shard{number}", number) for number in range(DEVICES)]
        settings = ["--set", f"server.certificate_days={DAYS}", "--set", f"round.quorum={DEVICES}"]
        closed: list[float] = []

        def hear(_: int, at: float, line: str) -> None:
            if " closed: " in line:
                closed.append(at)

        with federation(work, shards, [*FLAGS, *settings], [], on_line=hear) as (server, devices):
            time.sleep(minutes * 60)
            ended = [str(each) for each in (server, *devices) if each.process.poll() is not None]
        return figures(ServerHome(work / "server"), closed) | {"processes_that_ended": len(ended), "why": ended}


def figures(home: ServerHome, closed: list[float]) -> dict[str, Any]:
    rows = home.snapshot().rows
    with home.reading() as reader:
        renewals = sum(entry.event == "renewed" for entry, _ in reader.audit())
    updates = Counter(row.round for row in rows if row.work == "train")
    gaps = [later - earlier for earlier, later in itertools.pairwise(closed)]
    return {
        "rounds": len(updates),
        "rounds_without_a_device": sum(count < DEVICES for count in updates.values()),
        "renewals": renewals,
        "round_s_median": round(statistics.median(gaps), 3) if gaps else None,
        "round_s_longest": round(max(gaps), 3) if gaps else None,
    }


@click.command()
@click.option("--minutes", type=float, default=10.0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(minutes: float, out: Path) -> None:
    os.environ[faults.VARIABLE] = f"*:*:training=sleep:{BATCH_S}"
    found = measure(minutes)
    whole = {
        "command": f"python -m benchmarks.certificates --minutes {minutes:g} --out {out}",
        "devices": DEVICES,
        "certificate_s": round(DAYS * 86400, 1),
        "minutes": minutes,
        "batch_s": BATCH_S,
        **found,
        "machine": machine(),
    }
    out.write_bytes(msgspec.json.format(msgspec.json.encode(whole), indent=2) + b"\n")
    sys.exit(bool(found["processes_that_ended"] or found["rounds_without_a_device"]))


if __name__ == "__main__":
    main()
