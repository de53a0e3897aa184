"""Growth of a round: 1 to 64 devices, 10^4 to 10^8 parameters, at most 4 x 10^8 numbers handed in, and fitted exponents.

These are rounds without computation (benchmarks.round) between real processes over mutual TLS. One process hosts all devices,
each with a connection of its own, because 64 processes of torch are too many for a small machine. An exponent is the slope of a
straight line through the logarithms, by least squares: over all points, and over the last three, where bytes outweigh the rest.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.machine import machine
from benchmarks.round import Case, measure

MOST = 400_000_000  # most numbers that all devices together hand in
BASE = Case(clients=4, parameters=100_000, tensors=8, rounds=5, warm_up=1, hosted=True)
SERIES = {
    "devices, 10^5 parameters": ("clients", tuple(replace(BASE, clients=2**k) for k in range(7))),
    "devices, 10^6 parameters": ("clients", tuple(replace(BASE, clients=4**k, parameters=10**6) for k in range(4))),
    "parameters, 4 devices": ("parameters", tuple(replace(BASE, parameters=10**k) for k in range(4, 9))),
    "parameters, 64 devices": (
        "parameters",
        tuple(replace(BASE, clients=64, parameters=p) for p in (10**4, 10**5, 10**6, MOST // 64)),
    ),
}
FIGURES = ("median_s", "cpu_server_s", "cpu_devices_s", "server_rss_above_idle_bytes")


def exponent(sizes: Sequence[float], figures: Sequence[float]) -> float | None:
    """Return b of figure = a size^b by least squares on logarithms, or None unless all figures are above 0."""
    if min(figures) <= 0 or len(sizes) < 2:
        return None
    slope, _ = np.polyfit(np.log(sizes), np.log(figures), 1)
    return round(float(slope), 2)


def fitted(along: str, rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Return the exponents of each figure, over all rows and over the last three."""
    return {
        name: {
            "all": exponent([row[along] for row in rows], [row[name] for row in rows]),
            "last_three": exponent([row[along] for row in rows[-3:]], [row[name] for row in rows[-3:]]),
        }
        for name in FIGURES
    }


@click.command()
@click.option("--most", default=MOST, show_default=True, help="Leave out cases in which devices hand in more.")
@click.option("--series", "chosen", multiple=True, type=click.Choice(list(SERIES)), default=tuple(SERIES), help="Default: all.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="A JSON file, written after each case.")
def main(most: int, chosen: tuple[str, ...], out: Path | None) -> None:
    """Measure every case once, also if it is in two series, and fit. Other series of the file stay."""
    found: dict[Case, dict[str, Any]] = {}
    report: dict[str, Any] = {
        "command": f"python -m benchmarks.growth {' '.join(sys.argv[1:])}".strip(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "series": json.loads(out.read_text())["series"] if out is not None and out.exists() else {},
    }
    for name in chosen:
        along, cases = SERIES[name]
        rows = []
        for case in (case for case in cases if case.clients * case.parameters <= most):
            if case not in found:
                found[case] = measure(case)
                shown = {key: found[case][key] for key in ("clients", "parameters", *FIGURES)}
                click.echo(json.dumps(shown))
            rows.append(found[case])
            report["series"][name] = {"along": along, "exponents": fitted(along, rows), "rows": rows}
            if out is not None:
                out.write_text(json.dumps(report, indent=1) + "\n")
        click.echo(f"{name}: {json.dumps(fitted(along, rows) if rows else None)}")


if __name__ == "__main__":
    main()
