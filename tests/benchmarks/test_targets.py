"""The table of targets takes each figure from the row of its work."""

from __future__ import annotations

import csv

import pytest

from benchmarks import target_tables


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
