"""Figures of benchmarks/closed_form.py for docs/methods/analytic.md."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from docs.markdown import table

RESULTS = Path(__file__).parent / "results"


def costs(folder: Path = RESULTS) -> Iterator[str]:
    """Yield a row for each measured federation."""
    rows = []
    for what in ("devices", "outputs"):
        of = _read(folder, what)
        outputs, seconds = of.get("outputs", 10), of["processor_s"]
        memory = f"{of['peak_mib'] - of['before_mib']:,} MiB"
        whole = "simulated, from end to end"
        if what == "outputs":
            whole, seconds = "the server's part of a round", of["close_s"] + of["devices"] * (of["check_s"] + of["serve_s"])
        rows.append((f"{of['devices']:,}", str(of["features"]), f"{outputs:,}", whole, f"{seconds:.0f} s", memory))
    yield from table(("devices", "features", "outputs", "what", "processor time", "memory beside the data"), rows)


def kinds(folder: Path = RESULTS) -> Iterator[str]:
    """Yield a row for each kind of device on a small machine (benchmarks/light.py)."""
    names = {"light": "light", "small": "a network of 64", "full": "a network of 512 and 256"}
    devices = msgspec.json.decode((folder / "light.json").read_bytes())["devices"]
    rows = [
        (
            names[kind],
            f"{of['start_s']:.0f} s",
            f"{of['round_s']:.1f} s",
            f"{of['waiting_mb']:.0f} MB",
            f"{of['peak_mb']:.0f} MB",
        )
        for kind, of in devices.items()
    ]
    yield from table(("device", "start", "work of a round", "memory, waiting", "memory, at most"), rows)


def flipped(folder: Path = RESULTS) -> Iterator[str]:
    """Yield a row for each recipe: accuracies without and with wrong labels, and the places of the liars."""
    rows = []
    for (recipe, x), of in groupby(_read(folder, "flipped")["rows"], lambda row: (row["recipe"], row["x"])):
        seeds = list(of)

        def both(name: str, seeds: list[dict[str, Any]] = seeds) -> str:
            return " / ".join(f"{100 * fmean(row[run][name] for row in seeds):.1f}" for run in ("clean", "flipped"))

        places = "; ".join(", ".join(map(str, row["flipped"]["places"])) for row in seeds)
        rows.append((f"`{recipe}`", f"{x:g}", both("common"), both("personal"), places))
    heads = ("recipe", "x", "common model, without / with, %", "own models, %", "places of the three, by seed")
    yield from table(heads, rows)


def sizes(folder: Path = RESULTS) -> Iterator[str]:
    """Yield a row for each point: accuracies of devices' own models by the number of features."""
    with (folder / "closed_form_sizes.csv").open(newline="") as file:
        scores = list(csv.DictReader(file))
    numbers = sorted({int(row["features"]) for row in scores})
    rows = []
    for (recipe, x), some in groupby(scores, lambda row: (row["recipe"], row["x"])):
        here = list(some)
        means = [100 * fmean(float(row["own"]) for row in here if int(row["features"]) == number) for number in numbers]
        rows.append((f"`{recipe}`", f"{float(x):g}", *(f"{mean:.1f}" for mean in means)))
    yield from table(("recipe", "x", *(f"{number:,} features" for number in numbers)), rows)


def _read(folder: Path, what: str) -> dict[str, Any]:
    report: dict[str, Any] = msgspec.json.decode((folder / f"closed_form_{what}.json").read_bytes())
    return report
