"""Simulations by this revision and by another one in turn: processor time, which a busy machine disturbs less than time.

`python -m benchmarks.beside_revision --rev REV`: 10,000 devices (benchmarks.many_devices) and 100 devices that all train
(benchmarks.long_simulation), both cut short. Each pair of runs gives a ratio. The file has the medians.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import click
import msgspec

from benchmarks.machine import machine
from tests.same_bits.__main__ import ROOT, worktree

RESULT = Path(__file__).parent / "results" / "beside_revision.json"


def run(tree: Path, words: tuple[str, ...], out: Path) -> dict[str, Any]:
    """Run a benchmark of a tree on one thread, and return what it has measured."""
    path = {"PYTHONPATH": f"{tree / '.package'}{os.pathsep}{tree}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *words, "--out", str(out)]
    subprocess.run(command, cwd=tree, env=os.environ | path, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    report: dict[str, Any] = msgspec.json.decode(out.read_bytes())
    measured: dict[str, Any] = report.get("run", report)
    return measured


def works(devices: int, rounds: int) -> dict[str, tuple[str, ...]]:
    many = ("benchmarks.many_devices", "--devices", str(devices), "--rounds", "3")
    every = ("benchmarks.long_simulation", "--rounds", str(rounds), "--last", "1")
    return {"many devices": many, "all devices train": every}


@click.command()
@click.option("--rev", default="e4c1b43c", show_default=True, help="The other revision.")
@click.option("--devices", default=10_000, show_default=True)
@click.option("--rounds", default=60, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--only", help="Measure this one alone, and keep the others' figures.")
@click.option("--out", type=click.Path(path_type=Path), default=RESULT)
def main(rev: str, devices: int, rounds: int, repeats: int, only: str | None, out: Path) -> None:
    """Measure both revisions in turn, and write the figures as they come."""
    cases: dict[str, Any] = msgspec.json.decode(out.read_bytes())["cases"] if only and out.exists() else {}
    with tempfile.TemporaryDirectory(prefix="attune-beside-") as scratch, worktree(Path(scratch) / "then", rev) as then:
        for name, words in works(devices, rounds).items():
            if only in (None, name):
                runs: list[dict[str, float]] = []
                for _ in range(repeats):
                    pair = {side: run(tree, words, Path(scratch) / "out") for side, tree in (("then", then), ("now", ROOT))}
                    runs.append(_beyond_training(pair))
                    middle = {key: round(median(some[key] for some in runs), 3) for key in runs[0]}
                    cases[name] = {"command": " ".join(words), "runs": len(runs), **middle}
                    report = {"what": __doc__.split("\n")[0], "rev": rev, "machine": machine(), "cases": cases}
                    out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
                    click.echo(f"{name}: {cases[name]}")


def _beyond_training(pair: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return both sides' ms of processor time for a device, or for a device and round beyond training; and their ratio."""
    ms = {}
    for side, report in pair.items():
        trained = "training_s" in report
        count = report["devices"] * (report["rounds"] if trained else 1)
        ms[f"{side}_ms"] = 1000 * (report["processor_s"] - report.get("training_s", 0.0)) / count
    return ms | {"ratio": ms["now_ms"] / ms["then_ms"]}


if __name__ == "__main__":
    main()
