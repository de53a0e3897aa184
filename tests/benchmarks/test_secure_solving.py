"""Benchmarks of privacy: single updates from secure sums, methods with noise, and attacks in the table of docs/security.md."""

import csv
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import secure_solving, visible
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


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("attack", [visible.inputs, visible.other_update, visible.target_mean, visible.label_counts])
def test_the_committed_figures_are_what_an_attack_finds(attack) -> None:
    with (ROOT / "benchmarks/results/visible.csv").open(newline="") as file:
        kept = {(row["what"], row["setting"]): float(row["value"]) for row in csv.DictReader(file)}
    measured = {(row["what"], row["setting"]): float(row["value"]) for row in attack()}
    assert measured.items() <= kept.items() or all(kept[key] == pytest.approx(measured[key], rel=0.1) for key in measured)
