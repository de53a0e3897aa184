"""The program that solves for single updates from secure sums over other devices."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import secure_solving
from benchmarks.secure_solving import SeenSums


def test_sums_over_enough_other_cohorts_are_solved_exactly_and_one_sum_is_not() -> None:
    updates = {"a": np.array([1.0, 0.0]), "b": np.array([0.0, 2.0]), "c": np.array([3.0, 3.0])}
    samples = {"a": 1, "b": 2, "c": 1}
    means = {"ab": np.array([1 / 3, 4 / 3]), "bc": np.array([1.0, 7 / 3]), "ac": np.array([2.0, 1.5])}
    seen = SeenSums(
        [list(cohort) for cohort in means], list(means.values()), {name: [value] for name, value in updates.items()}
    )
    np.testing.assert_allclose(seen.errors(samples), 0.0, atol=1e-12)
    alone = SeenSums([["a", "b"]], [means["ab"]], {name: [value] for name, value in updates.items()})
    assert alone.errors(samples).min() > 0.1


def test_devices_that_remember_give_fewer_sums(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(secure_solving, "ATTEMPTS", secure_solving.ATTEMPTS[:2])
    out = tmp_path / "solved.csv"
    done = CliRunner().invoke(secure_solving.main, ["--rounds", "4", "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [row["sums"] for row in rows] == ["4", "2"]
