"""Attacks on privacy: the table in docs/security.md has the figures that they measure today."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks import visible

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("attack", [visible.inputs, visible.other_update, visible.target_mean, visible.label_counts])
def test_the_committed_figures_are_what_an_attack_finds(attack) -> None:
    with (ROOT / "benchmarks/results/visible.csv").open(newline="") as file:
        kept = {(row["what"], row["setting"]): float(row["value"]) for row in csv.DictReader(file)}
    measured = {(row["what"], row["setting"]): float(row["value"]) for row in attack()}
    assert measured.items() <= kept.items() or all(kept[key] == pytest.approx(measured[key], rel=0.1) for key in measured)
