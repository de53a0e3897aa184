"""A quick check before a change is proposed: some figures as ratios to the committed ones. It never fails.

Each figure is in units of the roof of its own run (raw TLS for a round's bytes, a copy in memory for a step's), so that a
faster or busier machine matters less. A ratio above 1 is slower than the committed figure. Processor time has no roof.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks import hypernetwork, mcsa
from benchmarks.round import Case, measure
from benchmarks.tls import raw_tls_bytes_per_s

RESULTS = Path(__file__).parent / "results"
ROUNDS = (
    Case(clients=2, parameters=1_000_000, tensors=8, rounds=6, warm_up=2),
    Case(clients=2, parameters=1_000, tensors=8, rounds=6, warm_up=2),
)
TLS_BYTES = 1 << 27
Line = tuple[str, float, float | None]  # name, present figure, committed figure


def committed(file: str, rows: str, **like: Any) -> dict[str, Any] | None:
    """Return the row of a file of results with these values, or None if there is none."""
    path = RESULTS / file
    found = json.loads(path.read_text())[rows] if path.exists() else []
    return next((row for row in found if all(row.get(key) == value for key, value in like.items())), None)


def spent_s(row: dict[str, Any]) -> float:
    """Return the processor time of a round, the server's and the devices'."""
    return float(row["cpu_server_s"] + row["cpu_devices_s"])


def rounds() -> Iterator[Line]:
    for case in ROUNDS:
        before_bytes_s, found = raw_tls_bytes_per_s(TLS_BYTES), measure(case)
        rate = (before_bytes_s + raw_tls_bytes_per_s(TLS_BYTES)) / 2
        name = f"round, {case.clients} devices, {case.parameters:,} parameters"
        row = committed("round.json", "rows", clients=case.clients, parameters=case.parameters, rtt_ms=0.0)
        moved_s = 8 * case.clients * case.parameters / rate
        yield f"{name}: times raw TLS", found["median_s"] / moved_s, row["median_s"] / row["tls_s"] if row else None
        yield f"{name}: processor time, s", spent_s(found), spent_s(row) if row else None


def aggregators() -> Iterator[Line]:
    clients, weights = mcsa.CASES[0]
    row = committed("mcsa.json", "cases", clients=clients, weights=weights)
    found = mcsa.measure(clients, weights // 10, repeats=2)
    yield "MCSA: times the smaller roof", 1 / found["share_of_roof"], 1 / row["share_of_roof"] if row else None
    beyond = "round_beyond_mixing_by_bytes"
    yield "MCSA: a round beyond mixing, by its bytes", found[beyond], row.get(beyond) if row else None
    for optimiser in hypernetwork.BYTES:
        row = committed("hypernetwork.json", "cases", optimiser=optimiser)
        found = hypernetwork.measure(optimiser, 5, hypernetwork.BLOCK // 8, repeats=2)
        yield f"hypernetwork, {optimiser}: times its roof", found["times_the_roof"], row["times_the_roof"] if row else None


def shown(line: Line) -> str:
    """Return the line `what: now 1.20, committed 1.00, ratio 1.20`."""
    what, now, before = line
    compared = "nothing committed" if not before else f"committed {before:.3g}, ratio {now / before:.2f}"
    return f"{what}: now {now:.3g}, {compared}"


@click.command()
def main() -> None:
    """Print what has become faster or slower."""
    torch.set_num_threads(1)
    for lines in (aggregators(), rounds()):
        for line in lines:
            click.echo(shown(line))


if __name__ == "__main__":
    main()
