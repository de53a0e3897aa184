"""Narrow links: a federation over 1, 5 and 20 Mbit/s in both directions with a round trip of 300 ms, or over other links.

It uses real processes over mutual TLS, with benchmarks.delay between them: every connection has a link of its own, behind a
modem's buffer of 128 KiB. The proxy counts connections (a device needs one to enrol and one to live), and bytes in both
directions. These are compared with the bytes of blobs that the devices and the server recorded.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from attune.fedserver.home import ServerHome
from benchmarks.delay import Counted, Proxy, Way, through
from benchmarks.machine import machine
from benchmarks.model import FACTORY
from benchmarks.processes import federation
from benchmarks.round import PLAN, make_shards

HANDSHAKE_BYTES = 20_000  # bytes of each connection: TLS, certificates in both directions, HTTP/2 settings
RATES_MBIT_S = (1.0, 5.0, 20.0)


@dataclass(frozen=True)
class Case:
    mbit_s: float  # in each direction
    rtt_ms: float = 300.0
    clients: int = 3
    parameters: int = 650_000  # float32: 2.6 MB
    rounds: int = 3
    patience_s: float = 1200.0


def measure(case: Case) -> dict[str, Any]:
    """Run one federation to its end, and measure it.

    Raises:
        ProcessEnded: A process has ended too early.
        TimeoutExpired: The federation does not end.
    """
    on = machine()
    quick = [
        "train.local_steps=1",
        "train.lr=1e-6",
        "train.momentum=0",
        f"model.parameters={case.parameters}",
        "model.tensors=4",
    ]
    settings = [word for setting in quick for word in ("--set", setting)]
    server_arguments = ["--exit-when-done", "--min-clients", str(case.clients), "--rounds", str(case.rounds), *settings]
    server_arguments += ["--method", "fedavg", "--model", FACTORY]
    proxies: list[Proxy] = []

    @contextmanager
    def between(port: int) -> Iterator[int]:
        with through(port, Way(case.rtt_ms / 1000, case.mbit_s)) as (way, proxy):
            proxies.append(proxy)
            yield way

    with tempfile.TemporaryDirectory(prefix="attune-links-") as folder:
        work = Path(folder)
        shards, own = make_shards(work, case.clients), ["--allow-model", FACTORY]
        with federation(work, shards, server_arguments, own, between=between) as (server, devices):
            server.wait_for(PLAN.pattern, 120.0, devices)
            began_s = time.monotonic()
            codes = [each.process.wait(case.patience_s) for each in (*devices, server)]
            seconds = time.monotonic() - began_s
            assert not any(codes), "\n".join(map(str, (server, *devices)))
        payload_bytes = _payload_bytes(work)
    counted: Counted = proxies[0].counted
    connections = counted.connections / case.clients
    overhead_bytes = counted.connections * HANDSHAKE_BYTES
    moved_bytes = counted.up_bytes + counted.down_bytes
    return asdict(case) | {
        "seconds": round(seconds, 1),
        "least_seconds": round(max(payload_bytes) * 8 / 1e6 / case.mbit_s / case.clients, 1),
        "connections_each": round(connections, 2),
        "blob_bytes": sum(payload_bytes),
        "moved_bytes": moved_bytes,
        "times_the_blobs": round((moved_bytes - overhead_bytes) / sum(payload_bytes), 4),
        "machine": on,
    }


def _payload_bytes(work: Path) -> tuple[int, int]:
    """Return the bytes of all blobs that counted, up and down."""
    rows = ServerHome(work / "server").snapshot().rows
    return sum(row.bytes_up or 0 for row in rows), sum(row.bytes_down or 0 for row in rows)


@click.command()
@click.option("--mbit-s", "rates", type=float, multiple=True, default=RATES_MBIT_S, show_default=True, help="Per direction.")
@click.option("--rtt-ms", type=float, default=300.0, show_default=True)
@click.option("--clients", type=int, default=3, show_default=True)
@click.option("--rounds", type=int, default=3, show_default=True)
@click.option("--parameters", type=int, default=650_000, show_default=True, help="float32")
@click.option("--out", type=click.Path(path_type=Path), help="The file of figures (default: only print them).")
def main(rates: tuple[float, ...], rtt_ms: float, clients: int, rounds: int, parameters: int, out: Path | None) -> None:
    """Run one federation at each rate."""
    found = []
    for rate in rates:
        found.append(measure(Case(rate, rtt_ms, clients, parameters, rounds)))
        click.echo(json.dumps(found[-1]))
    if out is not None:
        command = "python -m benchmarks.links " + " ".join(sys.argv[1:])
        out.write_text(json.dumps({"command": command, "cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
