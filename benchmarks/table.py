"""Rounds of several sizes, and the speed of raw TLS in the same run, as round.json and round.csv (docs/performance.md)."""

from __future__ import annotations

import csv
import json
import statistics
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from benchmarks.machine import machine
from benchmarks.round import Case, measure
from benchmarks.tls import raw_tls_bytes_per_s

FRAME_BYTES = 1 << 20


@dataclass(frozen=True)
class Row:
    case: Case
    target_s: float

    @property
    def target_bytes(self) -> float:
        """Goal for the server's memory above idle with the mean: 1.2 P + N frames."""
        return 1.2 * 4 * self.case.parameters + self.case.clients * FRAME_BYTES


ROWS = (
    Row(Case(clients=2, parameters=1_000_000, tensors=8, rounds=20), 0.052),
    Row(Case(clients=8, parameters=1_000_000, tensors=8, rounds=20), 0.15),
    Row(Case(clients=4, parameters=25_000_000, tensors=8, rounds=10), 1.7),
    Row(Case(clients=2, parameters=1_000_000, tensors=150, rounds=20, rtt_ms=50.0), 0.25),
    Row(Case(clients=2, parameters=1_000, tensors=8, rounds=40), 0.02),
)
COLUMNS = (
    "clients", "parameters", "tensors", "rtt_ms", "rounds", "median_s", "target_s", "p90_s", "min_s", "tls_s",
    "cpu_server_s", "cpu_devices_s",
    "server_rss_above_idle_bytes", "target_bytes", "load_1_min",
)  # fmt: skip


def measure_row(row: Row, repeats: int) -> dict[str, Any]:
    """Return the run with the middle median of `repeats`, the medians of all, and the time of raw TLS for a round's bytes."""
    tls_rates = [raw_tls_bytes_per_s()]
    runs = [measure(row.case) for _ in range(repeats)]
    tls_rates.append(raw_tls_bytes_per_s())
    ordered = sorted(runs, key=lambda run: float(run["median_s"]))
    moved_bytes = 2 * row.case.clients * 4 * row.case.parameters
    rate = statistics.mean(tls_rates)
    return ordered[(repeats - 1) // 2] | {
        "medians_s": [run["median_s"] for run in runs],
        "target_s": row.target_s,
        "target_bytes": round(row.target_bytes),
        "moved_bytes": moved_bytes,
        "raw_tls_bytes_per_s": round(rate),
        "tls_s": round(moved_bytes / rate, 4),
    }


def write(out: Path, command: str, rows: list[dict[str, Any]]) -> None:
    """Write everything to round.json, and the columns that people compare to round.csv."""
    out.mkdir(parents=True, exist_ok=True)
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    whole = {"date": date, "command": command, "machine": machine(), "rows": rows}
    (out / "round.json").write_text(json.dumps(whole, indent=2) + "\n")
    with (out / "round.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([(row | row["machine"])[column] for column in COLUMNS] for row in rows)


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder for round.json, round.csv."
)
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Federations for each row.")
def main(out: Path, repeats: int) -> None:
    """Measure all rows. Figures are written with their targets, whether these are met or not."""
    rows: list[dict[str, Any]] = []
    for row in ROWS:
        found = measure_row(row, repeats)
        rows.append(found)
        click.echo(
            f"{found['clients']} clients, {found['parameters']:,} in {found['tensors']} tensors, {found['rtt_ms']:g} ms: "
            f"{found['median_s']:.3f} s (target {found['target_s']:g}, raw TLS {found['tls_s']:.3f}), memory above idle "
            f"{found['server_rss_above_idle_bytes'] / 2**20:.1f} MiB (target {found['target_bytes'] / 2**20:.1f})"
        )
        write(out, f"python -m benchmarks.table {' '.join(sys.argv[1:])}", rows)


if __name__ == "__main__":
    main()
