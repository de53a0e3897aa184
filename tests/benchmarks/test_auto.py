"""The cost of choosing: the committed table is made of its rows, and the command runs what is missing alone."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import auto

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


def test_finished_rows_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def noted(shards: list[Path], method: str, *rest: object) -> dict[str, object]:
        assert len(shards) == 10
        ran.append(method)
        return {"chosen": method, "kept": 50.0}

    monkeypatch.setattr(auto, "kept", noted)
    words = ["--recipe", "digits", "--x", "40", "--rounds", "3", "--out", str(tmp_path / "auto.csv")]
    first = CliRunner().invoke(auto.main, words, catch_exceptions=False)
    assert ran == ["auto", "local", *auto.USUAL]
    assert CliRunner().invoke(auto.main, words, catch_exceptions=False).output == first.output and len(ran) == 6


def test_the_committed_rows_are_whole() -> None:
    with (ROOT / "benchmarks" / "results" / "auto.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for recipe, x, seed in {(row["recipe"], row["x"], row["seed"]) for row in rows}:
        methods = {row["method"] for row in rows if (row["recipe"], row["x"], row["seed"]) == (recipe, x, seed)}
        assert methods == {"auto", "local", *auto.USUAL}
