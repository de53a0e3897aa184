"""The table of targets takes each figure from the row of its work, and options of the wire are compared by medians."""

from __future__ import annotations

import csv

import pytest

from benchmarks import target_tables, wire_options


@pytest.mark.parametrize(("devices", "parameters"), target_tables.ROUNDS)
def test_a_target_of_a_round_has_the_row_without_delay(devices, parameters):
    with (target_tables.RESULTS / "round.csv").open(newline="", encoding="utf-8") as file:
        row = next(
            row
            for row in csv.DictReader(file)
            if (row["clients"], row["parameters"], row["tensors"], row["rtt_ms"]) == (str(devices), str(parameters), "8", "0.0")
        )
    work = f"round, {devices} x {parameters // 1_000_000} M"
    line = next(line for line in target_tables.targets() if line.startswith(f"| {work} |"))
    assert f"| {float(row['median_s']):.3g} s |" in line


def test_ways_of_the_wire_are_compared_by_their_medians():
    ways = {name: [{"wall_s": s, "processor_s": 1.0} for s in (9.0, 2.0 + k, 1.0)] for k, name in enumerate(wire_options.WAYS)}
    report = wire_options._report({}, {"2 x 10": ways})
    assert [way["wall_s"] for way in report["medians"]["2 x 10"].values()] == [2.0, 3.0, 4.0]
    assert [way["wall_s"] for way in report["ratios"]["2 x 10"].values()] == [1.0, 1.5, 2.0]
