"""The cost of choosing: the committed table is made of its rows, and the command runs what is missing alone."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import attune
from benchmarks import auto
from tests.e2e.harness import tabular_shard

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
        plain = {shard.name: torch.arange(20) < 10 for shard in shards}
        return auto.Outcome(right, plain, {number: {shard.name: -1.0 / len(ran) for shard in shards} for number in (1, 2, 3)})

    monkeypatch.setattr(auto, "outcome", trained)
    words = ["--recipe", "digits", "--x", "40", "--rounds", "3", "--out", str(tmp_path / "auto.csv")]
    first = CliRunner().invoke(auto.main, words, catch_exceptions=False)
    assert ran == ["local", *auto.USUAL]
    assert CliRunner().invoke(auto.main, words, catch_exceptions=False).output == first.output and len(ran) == 5
    assert "| digits | 40 | 3 | 0 | `fedmcsa` | 75.0 | 75.0 (`fedmcsa`) | +0.0 |" in first.output
    assert "| digits | 40 | 3 | 1 | `fedtp` | 50.0, 70.0 | 0, 0 |" in first.output


def test_a_choice_from_scores_is_that_of_a_race(tmp_path: Path) -> None:
    shards = [tabular_shard(tmp_path / f"site{n}", seed=n, samples=40) for n in range(3)]
    settings = {"train.local_epochs": 1, "model.name": "dnn"}
    rounds, seed = 4, 3
    outcomes = {name: auto.outcome(shards, name, rounds, seed, settings) for name in ("local", "fedavg", "fedper")}
    candidates = {"auto.candidates": ["fedavg", "fedper"]}
    options: dict[str, Any] = {"rounds": rounds, "seed": seed, "progress": False}
    raced = attune.simulate(shards, "auto", settings=settings | candidates, **options)
    assert raced.auto is not None and auto.chosen(outcomes, rounds) == raced.auto.chosen
    for finish, right in (("auto", outcomes["fedper"].finished), ("off", outcomes["fedper"].unfinished)):
        result = attune.simulate(shards, "fedper", settings=settings | {"train.finish": finish}, **options)
        kept = {row.device: row.kept for row in result.table()}
        assert {name: float(of.double().mean()) for name, of in right.items()} == pytest.approx(kept), finish


def test_the_committed_rows_are_whole() -> None:
    with (ROOT / "benchmarks" / "results" / "auto.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for run in {tuple(row[name] for name in auto.COLUMNS[:4]) for row in rows}:
        methods = {row["method"] for row in rows if tuple(row[name] for name in auto.COLUMNS[:4]) == run}
        assert methods - set(auto.USUAL) == {"auto", "local"} and "fedavg" in methods
