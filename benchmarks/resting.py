"""Memory of a waiting device: `python -m benchmarks.resting --out FILE`.

A real `fedclient` and a real `fedserver` are connected over mutual TLS. The server is paused after a round, so the device waits
between two orders. Memory is that of all processes of the device, from /proc/PID/smaps_rollup: in PSS, pages that several
processes of the machine share count by their shares, and in RSS wholly:
10 s after an order, and after the device may rest. Then rounds go on: how long until the device has done the next order? In
`first_order_s` is the start of the device.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.machine import machine
from benchmarks.processes import BIN, Speaker, environment, federation
from benchmarks.usage import tree

ROUND = r"round \d+ "
DONE_S, LOOK_S = 120.0, 0.02
SETTLED_S = 10.0


def memory_mb(pids: Sequence[int], key: str) -> float:
    """Return the sum of Pss, or of Rss, of these processes."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return round(sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")) / 1e6, 1)


def shard(folder: Path) -> Path:
    """Write a shard of 64 samples of 8 features in 2 classes."""
    rng = np.random.default_rng(1)
    y = rng.integers(0, 2, 64)
    folder.mkdir()
    np.savez(folder / "train.npz", x=(rng.normal(size=(64, 8)) + y[:, None]).astype("f4"), y=y)
    return folder


def waiting(device: Speaker) -> dict[str, Any]:
    """Return how many processes the device has, and their memory."""
    pids = tree(device.process.pid)
    return {"processes": len(pids), "pss_mb": memory_mb(pids, "Pss"), "rss_mb": memory_mb(pids, "Rss")}


def measured(work: Path, flags: Sequence[str], rest_s: float) -> dict[str, Any]:
    """Measure a device with these flags, which may rest after `rest_s` seconds."""

    def seconds_of_round(server_word: str = "") -> float:
        """Return after how many seconds from now, or from this word to the server, the device has done an order."""
        begun = time.monotonic()
        if server_word:
            subprocess.run([BIN / "fedserver", server_word], env=environment(work), check=True, capture_output=True)
            begun = time.monotonic()  # the round opens about now; the command itself takes a second
        while not any(at > begun and re.match(ROUND, line) for at, line in list(device.lines)):
            assert time.monotonic() - begun < DONE_S and device.process.poll() is None, str(device)
            time.sleep(LOOK_S)
        return round(time.monotonic() - begun, 2)

    # Rounds follow each other at once, so the operator pauses them; one that has begun goes on to its end.
    server_flags = ["--rounds", "100000", "--min-clients", "1", "--set", "train.local_epochs=1", "--dashboard", "off"]
    with federation(work, [shard(work / "site")], server_flags, list(flags)) as (_, [device]):
        row: dict[str, Any] = {"first_order_s": seconds_of_round()}
        subprocess.run([BIN / "fedserver", "pause"], env=environment(work), check=True, capture_output=True)
        time.sleep(SETTLED_S)
        row |= {"after_order": waiting(device)}
        time.sleep(rest_s + SETTLED_S)
        row |= {"later": waiting(device), "next_order_s": seconds_of_round("resume")}
    return row


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The file of results.")
@click.option("--rest", default=60.0, help="Seconds without work after which the device rests.")
def main(out: Path, rest: float) -> None:
    """Measure a device that rests, and one that does not."""
    rows = {}
    for name, flags in {"rests": ["--rest", str(rest)], "never rests": ["--rest", "0"]}.items():
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = measured(Path(folder), flags, rest)
        click.echo(f"{name}: {rows[name]}")
        out.write_text(json.dumps({"machine": machine(), "rest_s": rest, "devices": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
