"""Table of the targets of speed in docs/performance.md, written from result files, with what bounds each by its profile."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from docs.markdown import table

RESULTS = Path(__file__).parent / "results"
MILLION = 1_000_000
ROUNDS = {  # devices and parameters: target in seconds, and what bounds it
    (2, MILLION): (0.05, "0.032 s is the floor of the bytes; the rest is Python and the chain of syncs"),
    (8, MILLION): (0.15, "0.120 s is the floor; Python and fresh pages for tensors"),
    (4, 25 * MILLION): (1.4, "the floor, 1.53 s, is above the target: TLS and SHA-256 of these bytes"),
}


def targets() -> Iterator[str]:
    """Yield the table: each target with what was measured."""
    yield from table(("work", "target", "measured", "what bounds it"), [*_rounds(), _mixing(), *_simulations()])


def beside() -> Iterator[str]:
    """Yield the table of all contenders of benchmarks/side_by_side.py: processor time of a round, beside ours."""
    report = _read("side_by_side.json")
    rows = []
    for contender in report["linear"]["medians"]:
        cells = []
        for task in ("linear", "cnn"):
            taken, times = (report[task][part][contender]["processor_s"] for part in ("medians", "times"))
            cells += [f"{taken:.3f} s", f"{times:.2f}", f"{100 * report[task]['medians'][contender]['accuracy']:.1f} %"]
        rows.append((contender, *cells))
    heads = (f"{name}, {what}" for name in ("MLR", "CNN") for what in ("a round", "times ours", "accuracy"))
    yield from table(("", *heads), rows)


def _read(name: str) -> Any:
    return msgspec.json.decode((RESULTS / name).read_bytes())


def _rounds() -> Iterator[tuple[str, ...]]:
    with (RESULTS / "round.csv").open(newline="", encoding="utf-8") as file:
        plain = [row for row in csv.DictReader(file) if (int(row["tensors"]), float(row["rtt_ms"])) == (8, 0)]
    medians = {(int(row["clients"]), int(row["parameters"])): float(row["median_s"]) for row in plain}
    for (devices, parameters), (target_s, why) in ROUNDS.items():
        yield f"round, {devices} x {parameters // MILLION} M", f"{target_s} s", f"{medians[devices, parameters]:.3g} s", why


def _mixing() -> tuple[str, ...]:
    shares = ", ".join(f"{100 * case['share_of_roof']:.0f}" for case in _read("mcsa.json")["cases"])
    why = "torch's products of few rows; numpy's are faster, but have other bits"
    return "MCSA, 10, 20, 50 clients", "60 % of the limit", f"{shares} %", why


def _simulations() -> Iterator[tuple[str, ...]]:
    many, long, beside = _read("many_devices.json"), _read("long_simulation.json")["run"], _read("side_by_side.json")
    each_ms = 1000 * many["processor_s"] / many["devices"]
    why = "a fifth prepares samples; the rest is spread over each device's stream, orders and two scores"
    yield f"simulation of {many['devices']:,} devices, each", "3 ms", f"{each_ms:.1f} ms, {many['rounds']} rounds included", why
    measured = f"{long['processor_s']:.0f} s of processor time, of it {long['training_s']:.0f} s training"
    why = "a fifth is scoring, a quarter training; no call outside torch takes more than 4 %"
    yield f"{long['devices']} devices, {long['rounds']} rounds, stacked", "45 s", measured, why
    measured = f"{long['overhead_ms']:.2f} ms"
    calls = _read("simulation_overhead.json")["calls_a_device_and_round"]["fedavg, mlr"]["beyond_training"]
    why = f"{calls:,} calls of functions for orders, hand-ins and two scores (FedAvg); the time is of a version with 2,700"
    yield "the same, a device and round beyond training", "0.3 ms", measured, why
    times = 1 / beside["linear"]["times"]["fedjax"]["processor_s"]
    yield (
        "stacked, beside FedJAX",
        "1.3 times",
        f"{times:.1f} times",
        "Python of orders and hand-ins, as above: training is a quarter",
    )
