"""FedTP at the size of its paper over narrow links: 8 blocks of width 128, a hypernetwork of 237.6 M weights, 50 devices.

It uses real processes over mutual TLS: one server, one hosted fleet, and benchmarks.delay between them, which gives every
device a link of 50 Mbit/s in both directions with a round trip of 50 ms. Images are noise, and each device has few of them,
because time, memory and bytes are measured, not accuracy. The rest is the published setting: SGD on the server, 5 local epochs,
batches of 64.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

from attune.fedserver.home import ServerHome
from benchmarks.delay import Proxy, Way, through
from benchmarks.machine import machine
from benchmarks.processes import federation
from benchmarks.round import CLOSED, PLAN
from benchmarks.usage import cpu_s, status_bytes

LINK = Way(rtt_s=0.05, mbit_s=50.0)
EVALUATED = "evaluated"
PATIENCE_S = 7200.0
CLASSES = 10


@dataclass(frozen=True)
class Size:
    """Size of the federation: the paper's, unless a test asks for a small one."""

    devices: int = 50
    cohort: int = 5
    rounds: int = 3
    train_samples: int = 128  # training samples of a device
    test_samples: int = 32
    settings: tuple[str, ...] = ("model.preset=paper",)


def make_shards(folder: Path, size: Size) -> list[Path]:
    """Write shards with images of noise, 32 x 32 x 3, and every class on every device."""
    draw = np.random.default_rng(0)
    shards = [folder / "shards" / f"shard{index:02}" for index in range(size.devices)]
    for shard in shards:
        shard.mkdir(parents=True)
        for part, count in (("train", size.train_samples), ("test", size.test_samples)):
            x = draw.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
            np.savez(shard / f"{part}.npz", x=x, y=np.arange(count) % CLASSES)
    return shards


@dataclass
class Watch:
    """Times of the server's lines, with the resources that both processes had used by then."""

    said: list[tuple[str, float]] = field(default_factory=list)

    def hear(self, pid: int, at_s: float, line: str) -> None:

        for name, pattern in (("plan", PLAN), ("closed", CLOSED)):
            if pattern.search(line):
                self.said.append((name, at_s))


def taken(pid: int) -> dict[str, Any]:
    """Return the peak memory and the processor time of a process so far."""
    return {"peak_bytes": status_bytes(pid, "VmHWM"), "cpu_s": round(cpu_s(pid), 1)}


def measure(size: Size = Size(), way: Way = LINK) -> dict[str, Any]:
    """Run one federation to the end of the evaluation after its last round, and measure it.

    Raises:
        ProcessEnded: A process has ended too early.
    """
    on, watch = machine(), Watch()
    proxies: list[Proxy] = []

    @contextmanager
    def between(port: int) -> Iterator[int]:
        with through(port, way) as (here, proxy):
            proxies.append(proxy)
            yield here

    settings = (
        "method.server_optimiser=sgd", f"round.clients={size.cohort}", "round.evaluate_each_last=0", "train.local_epochs=5",
        "train.batch_size=64",
    )  # fmt: skip
    assignments = [word for setting in (*settings, *size.settings) for word in ("--set", setting)]
    arguments = ["--method", "fedtp", "--rounds", str(size.rounds), "--min-clients", str(size.devices), *assignments]
    with tempfile.TemporaryDirectory(prefix="attune-published-") as folder:
        work = Path(folder)
        make_shards(work, size)
        fleet = [work / "shards" / "*"]
        began_s = time.monotonic()
        with federation(work, fleet, arguments, [], on_line=watch.hear, between=between) as (server, (devices,)):
            for _ in range(size.rounds):
                server.wait_for(CLOSED.pattern, PATIENCE_S, [devices])
            closed = {"server": taken(server.process.pid), "devices": taken(devices.process.pid)}
            server.wait_for(EVALUATED, PATIENCE_S)
            evaluated_s, ended = time.monotonic(), {"server": taken(server.process.pid)}
        rows = ServerHome(work / "server").snapshot().rows
    counted = proxies[0].counted
    at = {name: [when for said, when in watch.said if said == name] for name in ("plan", "closed")}
    begins = [at["plan"][0], *at["closed"]]
    return {
        "what": "FedTP as printed over links of its own for every device",
        "devices": size.devices,
        "a_round": size.cohort,
        "mbit_s": way.mbit_s,
        "rtt_ms": way.rtt_s * 1000,
        "train_samples": size.train_samples,
        "until_plan_s": round(at["plan"][0] - began_s, 1),
        "rounds_s": [round(end - begin, 1) for begin, end in zip(begins, at["closed"], strict=False)],
        "evaluation_s": round(evaluated_s - at["closed"][-1], 1),
        "after_the_rounds": closed,
        "after_the_evaluation": ended,
        "blob_bytes_of_an_order": _of_orders(rows),
        "moved_bytes": {"up": counted.up_bytes, "down": counted.down_bytes, "connections": counted.connections},
        "machine": on,
    }


def _of_orders(rows: Any) -> dict[str, Any]:
    """Return the largest download and upload of an order, and the sums over all orders, by kind of work."""
    found = {}
    for work in ("train", "evaluate"):
        own = [row for row in rows if row.work == work]
        down, up = ([getattr(row, name) or 0 for row in own] for name in ("bytes_down", "bytes_up"))
        found[work] = {"orders": len(own), "most_down": max(down, default=0), "most_up": max(up, default=0)}
        found[work] |= {"all_down": sum(down), "all_up": sum(up)}
    return found


@click.command()
@click.option("--devices", default=Size.devices, show_default=True)
@click.option("--rounds", default=Size.rounds, show_default=True)
@click.option("--train-samples", default=Size.train_samples, show_default=True, help="Training samples of each device.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="A JSON file (default: only print it).")
def main(devices: int, rounds: int, train_samples: int, out: Path | None) -> None:
    """Run the federation, and write its figures."""
    found = measure(Size(devices=devices, rounds=rounds, train_samples=train_samples))
    text = json.dumps({"command": f"python -m benchmarks.published_size {' '.join(sys.argv[1:])}".strip()} | found, indent=1)
    click.echo(text)
    if out is not None:
        out.write_text(text + "\n")


if __name__ == "__main__":
    main()
