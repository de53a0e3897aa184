"""README's figures of the demo are those of the committed file."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import fmean
from typing import Any

from attune.common.statistics import mcnemar
from examples.outcome import COLUMNS


def test_the_figures_of_the_demo_come_from_its_file(page: Any, root: Path) -> None:
    with (root / "benchmarks" / "results" / "demo.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    total = sum(int(row["test_samples"]) for row in rows)
    columns = [key for key in COLUMNS if key in rows[0]]
    means = [fmean(float(row[key]) for row in rows) for key in columns]
    pooled = [sum(float(row[key]) * int(row["test_samples"]) for row in rows) / total for key in columns]
    text = page("README.md").text.replace("**", "").replace("\n", " ")
    assert f"| mean over devices | {' | '.join(f'{value:.3f}' for value in means)} |" in text
    assert f"| over all {total} test samples | {' | '.join(f'{value:.3f}' for value in pooled)} |" in text
    numbers = ("none", "one", "two", "three", "four", "five")
    forms = {
        "kept": f"ahead of alone on {{}} of the {len(rows)} devices and behind on {{}} (sign test, p = {{:.2g}})",
        "analytic": "ahead of alone on {} devices, behind on {} (p = {:.2g})",
    }
    for model, form in forms.items():
        gains = [float(row[model]) - float(row["alone"]) for row in rows]
        ahead, behind = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
        assert form.format(ahead, numbers[behind], mcnemar(ahead, behind)) in text
