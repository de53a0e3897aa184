"""Benchmarks of the choice between models, and of races between methods."""

import csv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import attune
from attune.common.errors import SettingError
from attune.simulation.partition.datasets import DIGITS, load_source
from attune.simulation.partition.split import write_shards
from benchmarks import auto, choice
from benchmarks.recipes.catalogue import SERVED, get
from benchmarks.recipes.run import harmed
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


@pytest.mark.parametrize(("most", "rounds"), [(60, 1), (12, 4)])
def test_a_blend_is_judged_against_the_common_model_and_the_one_trained_alone(tmp_path, monkeypatch, most, rounds):
    """Test also the case that 12 samples are too few for a choice."""
    recipe = replace(small(2), rounds=rounds, settings=SETTINGS | {"train.local_epochs": 600 // most, "train.lr": 0.05})
    shards = write_shards(tmp_path / "shards", recipe.points[0].cut(load_source(DIGITS), 0))
    for shard in shards:
        with np.load(shard / "train.npz") as train:
            few = {name: array[:most] for name, array in train.items()}
        np.savez(shard / "train.npz", **few)
    ended, local = (choice.ended_with(method, shards, recipe, 0) for method in ("fedmcsa", "local"))
    clients = {client["name"]: client for client in ended.status["clients"]}
    seen = {}
    monkeypatch.setattr(
        choice, "harmed", lambda mine, rivals, *groups: seen.update(mine=mine, **rivals) or harmed(mine, rivals, *groups)
    )
    blends = [shard for shard in shards if len(ended.model(shard.name).members) == 3]
    assert len(blends) == len(shards) or (most == 12 and blends), "of 12 samples some have no use for the common model"
    for shard in blends:
        model, client = ended.model(shard.name), clients[shard.name]
        choice.is_harmed(shard, client, model, local.model(shard.name))
        for name, key in (("mine", "kept"), ("common", "common"), ("local", "local")):
            assert np.mean(seen[name]) == pytest.approx(client[f"accuracy_{key}"])


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


def test_a_point_that_no_recipe_has_is_named(tmp_path):
    found = CliRunner().invoke(choice.main, ["--recipe", "digits", "--x", "68.5", "--out", str(tmp_path / "choice.csv")])
    assert found.exit_code == 2
    assert "digits has no point 68.5" in found.output
    assert not (tmp_path / "choice.csv").exists()


ROOT = Path(__file__).parents[2]


def test_behind_is_the_best_candidate_minus_the_choice() -> None:
    row = {"recipe": "digits", "x": "40", "rounds": "20", "seed": "0"}
    rows = [
        row | {"method": "auto", "chosen": "fedper", "kept": "85.4"},
        row | {"method": "fedper", "chosen": "fedper", "kept": "85.4"},
        row | {"method": "fedtp", "chosen": "fedtp", "kept": "90.6"},
    ]
    assert list(auto.lines(rows))[2:] == ["| digits | 40 | 20 | 0 | `fedper` | 85.4 | 90.6 (`fedtp`) | +5.2 |"]
    assert len(list(auto.lines(rows[1:]))) == 2, "without a race there is no line"


def test_finished_points_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def trained(shards: list[Path], method: str, *rest: object) -> auto.Outcome:
        assert len(shards) == 10
        ran.append(method)
        right = {shard.name: torch.arange(20) < 10 + len(ran) for shard in shards}
        return auto.Outcome(right, dict.fromkeys((1, 2, 3), ({shard.name: -1.0 / len(ran) for shard in shards}, {}, {})))

    monkeypatch.setattr(auto, "outcome", trained)
    words = ["--recipe", "digits", "--x", "40", "--rounds", "3", "--out", str(tmp_path / "auto.csv")]
    first = CliRunner().invoke(auto.main, words, catch_exceptions=False)
    assert ran == ["local", *auto.USUAL]
    assert CliRunner().invoke(auto.main, words, catch_exceptions=False).output == first.output and len(ran) == 6
    assert "| digits | 40 | 3 | 0 | `fedmcsa` | 80.0 | 80.0 (`fedmcsa`) | +0.0 |" in first.output


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


def test_where_devices_have_no_closed_form_it_is_no_candidate(tmp_path: Path) -> None:
    shards = [tabular_shard(tmp_path / f"site{n}", seed=n, samples=40) for n in range(2)]  # each scales its own columns
    with pytest.raises(SettingError, match="scale"):
        auto.outcome(shards, "closed-form", 3, 0, {"model.name": "mlr"})


def test_the_committed_rows_are_whole() -> None:
    with (ROOT / "benchmarks" / "results" / "auto.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for run in {tuple(row[name] for name in auto.COLUMNS[:4]) for row in rows}:
        methods = {row["method"] for row in rows if tuple(row[name] for name in auto.COLUMNS[:4]) == run}
        assert methods - set(auto.USUAL) == {"auto", "local"} and "fedavg" in methods
