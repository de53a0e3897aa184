"""Benchmarks of the choice between models, and of races between methods."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import attune
from attune.simulation.partition.datasets import DIGITS
from benchmarks import auto, choice
from benchmarks.recipes.catalogue import SERVED, get
from benchmarks.result_file import Results
from tests.e2e.harness import tabular_shard

SETTINGS = {"model.name": "dnn", "model.hidden": [20], "train.local_epochs": 1}


def small(at: int):
    recipe = get("label-shift")
    return replace(recipe, entries=SERVED, rounds=2, settings=SETTINGS, points=recipe.points[at : at + 1])


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({"common": (0, 6)}, True),  # two-sided, exact: 2 / 2^6
        ({"common": (6, 0)}, False),
        ({"common": (0, 5)}, False),  # 2 / 2^5 > 0.05
        ({"common": (0, 6), "local": (3, 3)}, False),  # Holm: twice 0.031
        ({"common": (0, 7), "local": (3, 3)}, True),
        ({}, False),
    ],
)
def test_a_device_that_keeps_its_own_model_is_judged_by_its_own_counts(tmp_path, counts, expected):
    client = {f"{word}_than_{name}": None for word in ("better", "worse") for name in choice.RIVALS}
    for name, (better, worse) in counts.items():
        client |= {f"better_than_{name}": better, f"worse_than_{name}": worse}
    found = choice.is_harmed(tmp_path, client, SimpleNamespace(members={"personalized": None}), None)
    assert found == (expected, expected)


def test_a_run_that_was_interrupted_goes_on(tmp_path):
    recipe = small(0)
    results = Results(tmp_path / "choice.csv", (*choice.KEY, *choice.FIGURES))
    for _ in range(2):
        choice.measured(recipe, recipe.points[0], DIGITS, 0, results)
    rows = results.rows()
    assert [row["method"] for row in rows] == ["fedavg", "fedmcsa", "pfedhn"]
    for row in rows[:2]:
        best = max(float(row["common"]), float(row["local"]))
        assert float(row["behind"]) == pytest.approx(100 * (best - float(row["kept"])), abs=0.02)
        assert row["choosing"] == "1.0" and row["devices"] == "10"
    assert len(list(choice.lines(rows))) == 2 + 3


def test_behind_is_the_best_candidate_minus_the_choice() -> None:
    row = {"recipe": "digits", "x": "40", "rounds": "20", "seed": "0"}
    rows = [
        row | {"method": "auto", "chosen": "fedper", "kept": "85.4"},
        row | {"method": "fedper", "chosen": "fedper", "kept": "85.4"},
        row | {"method": "fedtp", "chosen": "fedtp", "kept": "90.6"},
    ]
    assert list(auto.lines(rows))[2:] == ["| digits | 40 | 20 | 0 | `fedper` | 85.4 | 90.6 (`fedtp`) | +5.2 |"]
    assert len(list(auto.lines(rows[1:]))) == 2, "without a race there is no line"


def test_a_choice_from_scores_is_that_of_a_race(tmp_path: Path) -> None:
    shards = [tabular_shard(tmp_path / f"site{n}", seed=n, samples=40) for n in range(3)]
    settings = {"train.local_epochs": 1, "model.name": "dnn"}
    rounds, seed = 4, 3
    outcomes = {name: auto.outcome(shards, name, rounds, seed, settings) for name in ("local", "fedavg", "fedper")}
    candidates = {"auto.candidates": ["fedavg", "fedper"]}
    options: dict[str, Any] = {"rounds": rounds, "seed": seed, "progress": False}
    raced = attune.simulate(shards, "auto", settings=settings | candidates, **options)
    assert raced.auto is not None and auto.chosen(outcomes, rounds) == raced.auto.chosen
    result = attune.simulate(shards, "fedper", settings=settings, **options)
    kept = {row.device: row.kept for row in result.table()}
    assert {name: float(of.double().mean()) for name, of in outcomes["fedper"].kept.items()} == pytest.approx(kept)
