"""Benchmarks of privacy: single updates from secure sums, methods with noise, and attacks in the table of docs/security.md."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import private_methods, private_tables, secure_solving, visible
from benchmarks.private_methods import COLUMNS, SCORE, TASKS
from benchmarks.result_file import Results
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


METHODS = ("local", "fedavg", "fedavg+ft")
SMALL = replace(TASKS["digits-linear"], methods=METHODS, rounds=2, seeds=(0, 1), trial_seeds=(0,))
SMALL = replace(SMALL, rates=(1e-6, 0.3), epochs=(1,), clips=(1.0,))
GOOD, POOR = ("train.lr=0.3 train.local_epochs=1 privacy.clip=1", "train.lr=1e-06 train.local_epochs=1 privacy.clip=1")
POOR_TUNED, TUNED = (f"{settings} method.tune_epochs=20" for settings in (POOR, GOOD))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(private_methods, "TASKS", {"digits-linear": SMALL})
    monkeypatch.setattr(private_tables, "TASKS", {"digits-linear": SMALL})
    monkeypatch.setattr(private_tables, "OUT", tmp_path)
    return tmp_path


def test_settings_are_chosen_on_validation_parts_and_a_second_start_runs_nothing(small: Path) -> None:
    words = ["--task", "digits-linear", "--epsilon", "8", "--out", str(small)]
    done = CliRunner().invoke(private_methods.main, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    rows = Results(small / "digits-linear.csv", COLUMNS).rows()
    assert {row["settings"] for row in rows if row["part"] == "test"} == {GOOD, TUNED}
    assert len(rows) == 3 * (2 + 2)
    before = (small / "digits-linear.csv").read_bytes()
    assert CliRunner().invoke(private_methods.main, words).exit_code == 0
    assert (small / "digits-linear.csv").read_bytes() == before
    score = {(row["method"], row["seed"]): float(row[SCORE]) for row in rows if row["part"] == "test"}
    assert all(score["fedavg+ft", seed] > score["fedavg", seed] for seed in "01")


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("attack", [visible.inputs, visible.other_update, visible.target_mean, visible.label_counts])
def test_the_committed_figures_are_what_an_attack_finds(attack) -> None:
    with (ROOT / "benchmarks/results/visible.csv").open(newline="") as file:
        kept = {(row["what"], row["setting"]): float(row["value"]) for row in csv.DictReader(file)}
    measured = {(row["what"], row["setting"]): float(row["value"]) for row in attack()}
    assert measured.items() <= kept.items() or all(kept[key] == pytest.approx(measured[key], rel=0.1) for key in measured)
