"""A round without computation: the time of the server, the wire and the disks (anchors.md section 1).

It uses real processes over mutual TLS. A round's time is that between two `round k/n closed` lines of the server, stamped as
they arrive. It includes orders, downloads, the least training that the product allows (one step on three samples that touches
one tiny tensor, and the two evaluations), the devices' durable commits, uploads with digests, checks, the durable inbox,
receipts, aggregation and the durable commit. Memory is the server's peak from the plan on (torch imported, first state written)
minus the resident memory at that moment.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.machine import machine
from benchmarks.model import FACTORY
from benchmarks.processes import Speaker, federation
from benchmarks.usage import cpu_s, reset_peak, status_bytes

PLAN = re.compile(r"\bplan: ")
CLOSED = re.compile(r"\bround \d+/\d+ closed")
START_S = 600.0  # longest time until the first round has closed
ROUND_S = 120.0


@dataclass(frozen=True)
class Case:
    clients: int
    parameters: int  # number of float32 parameters
    tensors: int
    rounds: int
    rtt_ms: float = 0.0
    method: str = "fedavg"
    warm_up: int = 3  # rounds before those that count
    hosted: bool = False  # all devices in one process, each with a connection of its own


class ServerWatch:
    """Listener to the server's lines, which records its memory as they come."""

    def __init__(self) -> None:
        self.closed_s: list[float] = []
        self.idle_bytes = self.start_peak_bytes = self.peak_bytes = 0

    def hear(self, pid: int, at_s: float, line: str) -> None:
        if PLAN.search(line):
            self.idle_bytes, self.start_peak_bytes = status_bytes(pid, "VmRSS"), status_bytes(pid, "VmHWM")
            reset_peak(pid)
        elif CLOSED.search(line):
            self.closed_s.append(at_s)
            self.peak_bytes = status_bytes(pid, "VmHWM")


def make_shards(folder: Path, clients: int) -> list[Path]:
    """Write three samples for training and for testing for each device.

    One label is more frequent, so that every round changes the state: unchanged tensors would not travel.
    """
    x, y = np.zeros((3, 1), np.float32), np.array([0, 0, 1])
    shards = [folder / f"shard{index}" for index in range(clients)]
    for shard in shards:
        shard.mkdir(parents=True)
        for part in ("train", "test"):
            np.savez(shard / f"{part}.npz", x=x, y=y)
    return shards


def _cpu_s(server: Speaker, devices: list[Speaker]) -> tuple[float, float]:
    """Return the processor time so far, the server's and that of all devices."""
    return cpu_s(server.process.pid), sum(cpu_s(device.process.pid) for device in devices)


def measure(case: Case) -> dict[str, Any]:
    """Run one federation to the last measured round, and measure it.

    Raises:
        ProcessEnded: A process has ended too early.
    """
    on = machine()
    total = case.rounds + case.warm_up
    settings = ["train.local_steps=1", "train.lr=1e-6", "train.momentum=0", f"model.parameters={case.parameters}"]
    settings.append("round.evaluate_each_last=0")
    assignments = [word for setting in [*settings, f"model.tensors={case.tensors}"] for word in ("--set", setting)]
    server_arguments = ["--method", case.method, "--model", FACTORY, "--rounds", str(total), *assignments]
    watch = ServerWatch()
    with tempfile.TemporaryDirectory(prefix="attune-round-") as folder:
        work = Path(folder)
        shards = make_shards(work, case.clients)
        with federation(
            work,
            [work / "shard*"] if case.hosted else shards,
            [*server_arguments, "--min-clients", str(case.clients)],
            ["--allow-model", FACTORY],
            case.rtt_ms,
            watch.hear,
        ) as (server, devices):
            server.wait_for(CLOSED.pattern, START_S, devices)
            for _ in range(case.warm_up - 1):
                server.wait_for(CLOSED.pattern, ROUND_S, devices)
            before = _cpu_s(server, devices)
            for _ in range(case.rounds - 1):
                server.wait_for(CLOSED.pattern, ROUND_S, devices)
            used = [(now - then) / (case.rounds - 1) for now, then in zip(_cpu_s(server, devices), before, strict=True)]
            server.wait_for(CLOSED.pattern, ROUND_S, devices)
    closed_s = watch.closed_s
    rounds_s = [closed_s[index] - closed_s[index - 1] for index in range(case.warm_up, total)]
    return asdict(case) | {
        "median_s": round(statistics.median(rounds_s), 4),
        "p90_s": round(float(np.quantile(rounds_s, 0.9)), 4),
        "min_s": round(min(rounds_s), 4),
        "cpu_server_s": round(used[0], 4),
        "cpu_devices_s": round(used[1], 4),
        "server_rss_above_idle_bytes": watch.peak_bytes - watch.idle_bytes,
        "server_idle_bytes": watch.idle_bytes,
        "server_start_peak_above_idle_bytes": watch.start_peak_bytes - watch.idle_bytes,
        "model_bytes": 4 * case.parameters,
        "machine": on,
    }


@click.command()
@click.option("--clients", type=click.IntRange(1), default=2, show_default=True)
@click.option("--parameters", type=click.IntRange(4), default=1_000_000, show_default=True, help="float32 values in the model.")
@click.option("--tensors", type=click.IntRange(2), default=8, show_default=True, help="Tensors of the model.")
@click.option("--rounds", type=click.IntRange(2), default=20, show_default=True, help="Measured rounds.")
@click.option("--warm-up", type=click.IntRange(1), default=3, show_default=True, help="Rounds before the measured ones.")
@click.option("--rtt-ms", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Round-trip time to add.")
@click.option("--method", default="fedavg", show_default=True, help="A method that needs no special layers.")
@click.option("--hosted", is_flag=True, help="All devices in one process.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
def main(as_json: bool, **given: Any) -> None:
    """Measure the wall time of a round without computation."""
    found = measure(replace(Case(1, 4, 2, 1), **given))
    click.echo(
        f"{found['clients']} clients, {found['parameters']:,} parameters in {found['tensors']} tensors, "
        f"{found['rtt_ms']:g} ms: median {found['median_s']:.3f} s, p90 {found['p90_s']:.3f} s, least {found['min_s']:.3f} s, "
        f"processor time {found['cpu_server_s']:.3f} + {found['cpu_devices_s']:.3f} s, "
        f"server memory above idle {found['server_rss_above_idle_bytes'] / 2**20:.1f} MiB"
    )
    if as_json:
        click.echo(json.dumps(found))


if __name__ == "__main__":
    main()
