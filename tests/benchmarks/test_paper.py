"""The papers' tables: settings exist, the grid chooses on validation parts, runs continue, the page agrees with the files."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from attune.common.config import convert, parse_assignment
from attune.fedserver.core.planning import ResolvedSettings, resolve
from attune.simulation.grid_search import SHARED
from benchmarks import lines, paper, report, tables
from benchmarks.result_file import Results

SMALL = {
    "paper": "Nobody, Table 1",
    "rounds": 2,
    "set": ["train.local_steps=1", "train.batch_size=4", "train.validation=0", "model.name=mlr"],
    "grid": {"rounds": 1, "train": [["train.lr=0.000001"], ["train.lr=0.5"]]},
    "column": [
        {
            "name": "digits/mlr",
            "partition": ["--dataset", "digits", "--scheme", "pathological", "--clients", "5", "--classes-per-client", "2"],
            "seeds": [0, 1],
        }
    ],
    "row": [{"name": "Alone", "method": "local"}, {"name": "Mine", "method": "pfedme", "common": "Ours"}],
}


def resolved_of(table: tables.Table, column: tables.Column, row: tables.Row, settings: tables.Settings) -> ResolvedSettings:
    said: dict = {"method": {"name": row.method}}
    for key, value in map(parse_assignment, tables.given(table, column, row, settings)):
        said.setdefault(key[0], {})[key[1]] = value
    return resolve(said)


@pytest.mark.parametrize("name", tables.names())
def test_settings_of_every_table_exist_and_printed_cells_have_rows_and_columns(name):
    table = tables.load(name)
    for column in table.column:
        for row in table.row:
            for settings in tables.trials(table, row):
                resolved = resolved_of(table, column, row, settings)
                assert resolved.method.name == row.method
                bounds = resolved.configured.aggregators.values()
                assert all(each.bound == each.bound_samples == 0 for each in bounds), "no paper bounds what a device hands in"
                assert resolved.round.take_back == 0
                tuned = resolved.method.predictor == "fine-tune"
                dial = resolved.method_options.get("dial", False)
                everywhere = resolved.round.evaluate_every == 1
                assert (resolved.train.evaluate is False) == (tuned or dial or everywhere), "scored when all evaluate"
                assert row.baseline == dial, "the own value of a dial is what a device trained alone"
                assert not tuned or resolved.round.train == "sampled", "else figures of training rounds would be missed"
    rows = {row.name for row in table.row} | {row.common for row in table.row}
    columns = {column.name for column in table.column}
    leads = tables.printed(table.leads.printed) if table.leads else {}
    assert all(row in rows and column in columns for row, column in (*tables.printed(name), *leads))
    assert not table.leads or (leads and table.leads.row in rows)
    assert len({row.name for row in table.row}) == len(table.row)


@pytest.mark.parametrize("name", tables.names())
def test_every_row_of_a_table_has_the_same_choices_of_training(name):
    table = tables.load(name)
    tried = {
        row.name: {tuple(s for s in each if s.startswith(SHARED)) for each in tables.trials(table, row)} for row in table.row
    }
    assert len(set(map(frozenset, tried.values()))) == 1


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> tables.Table:
    table = convert(tables.Table, SMALL, "")
    monkeypatch.setattr(paper, "load", lambda name: table)
    monkeypatch.setattr(report, "load", lambda name: table)
    return table


def run(tmp_path: Path, *more: str) -> str:
    words = ("fedmcsa-1", "--scratch", str(tmp_path / "scratch"), "--out", str(tmp_path), "--executor", "sequential", *more)
    ended = CliRunner().invoke(paper.main, words, catch_exceptions=False)
    assert ended.exit_code == 0
    return ended.output


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_table_is_run_part_by_part_and_nothing_twice(small, tmp_path):
    run(tmp_path, "--row", "Alone", "--seed", "0")
    trials, results = rows(tmp_path / "fedmcsa-1_grid.csv"), rows(tmp_path / "fedmcsa-1.csv")
    assert [(row["row"], row["seed"], row["settings"]) for row in trials] == [
        ("Alone", "0", "train.lr=0.000001"),
        ("Alone", "0", "train.lr=0.5"),
    ]
    best = max(trials, key=lambda row: float(row["validation_over_samples"]))
    assert best["settings"] == "train.lr=0.5", "a rate of nothing learns nothing"
    assert [(row["row"], row["seed"], row["settings"], row["rounds"]) for row in results] == [
        ("Alone", "0", "train.lr=0.5", "2")
    ]
    [left] = [row for row in results if "--row Alone --seed 0" in row["command"]]
    assert left["worse_off"] == "", "no rival was run"
    assert left["commit"] and "cores" in left["machine"]
    run(tmp_path)
    assert [(row["row"], row["seed"]) for row in rows(tmp_path / "fedmcsa-1.csv")] == [
        ("Alone", "0"), ("Mine", "0"), ("Alone", "1"), ("Mine", "1"),
    ]  # fmt: skip
    [after_it] = [row for row in rows(tmp_path / "fedmcsa-1.csv") if (row["row"], row["seed"]) == ("Mine", "0")]
    assert 0 <= float(after_it["worse_off"]) <= 1, "beside Local, which was run before"
    assert len(rows(tmp_path / "fedmcsa-1_grid.csv")) == 4, "what the trials chose is taken for every seed"
    assert run(tmp_path) == ""
    said = "\n".join(report.section("fedmcsa-1", tmp_path))
    assert "All 4 runs of this table were made." in said
    ours = [100 * float(row["common_over_samples"]) for row in rows(tmp_path / "fedmcsa-1.csv") if row["row"] == "Mine"]
    assert f"| Ours |  | {sum(ours) / 2:.1f} ({min(ours):.1f} to {max(ours):.1f}, 2 seeds) |" in said.replace("*", "")


RIVALS = [{"name": "Mean", "method": "fedavg"}, {"name": "Alone", "method": "local"}]


def test_of_two_rivals_each_is_told_who_is_worse_off_than_with_the_other(tmp_path):
    """Make up answers: Local is right on all of eight samples, FedAvg on none."""
    table = convert(tables.Table, {**SMALL, "row": RIVALS}, "")
    made = paper.Paper(table, {}, tmp_path, *(Results(tmp_path / f"{n}.csv", paper.CELLS) for n in "abc"), "sequential")
    first, second = (paper.Cell("t", row, table.column[0], 0) for row in table.row)
    kept = {"table": "t", "column": table.column[0].name, "seed": "0", "worse_off": ""}
    for cell, right in ((first, False), (second, True)):
        answers = {client: np.full(8, right) for client in ("a", "b")}
        made.results.add([{**dict.fromkeys(paper.CELLS, ""), **kept, "row": cell.row.name}])
        np.savez(made._right(cell, cell.row), **answers)
        made.fill_rivals(cell)
    assert [(row["row"], row["worse_off"]) for row in made.results.rows()] == [("Mean", "1.0"), ("Alone", "0.0")]
    made.results.fill({"row": "Mean"}, {"worse_off": 0.5})
    assert made.results.rows()[0]["worse_off"] == "1.0", "only what was left empty"


@pytest.mark.parametrize(
    ("ours", "seeds", "verdict"),
    [
        ((80.9,), 1, "holds"),
        ((81.1,), 1, "does not"),
        ((78.5, 81.2), 2, "holds"),
        ((80.5, 82.0), 2, "not decided"),
        ((82.0, 83.0), 3, "does not (2 of 3 seeds)"),
        ((), 1, ""),
    ],
)
def test_a_printed_cell_holds_within_a_point(ours, seeds, verdict):
    assert lines.Line("FedAvg", 80.0, ours, (), seeds, "").verdict == verdict


@pytest.mark.parametrize(
    ("printed", "ours", "seeds", "verdict"),
    [
        (80.0, (60.0,), 1, "holds"),
        (80.0, (72.0,), 1, "does not"),
        (80.0, (70.9,), 1, "not decided"),
        (95.0, (72.0,), 1, "holds"),
        (80.0, (60.0,), 3, "holds (1 of 3 seeds)"),
        (None, (60.0,), 1, ""),
        (80.0, (), 1, ""),
    ],
)
def test_of_a_reduced_table_the_side_of_one_row_is_judged(printed, ours, seeds, verdict):
    reference = lines.Line("FedTP", 90.0, (70.0,), (), 1, "")
    assert lines.Line("FedAvg-T", printed, ours, (), seeds, "").direction(reference) == verdict
    assert reference.direction(reference) == ""


def test_a_lead_is_compared_where_a_figure_prints_it_and_both_rows_were_run():
    table = tables.load("fedmcsa-2")
    column = next(column for column in table.column if column.name == "synthetic/mlr")

    def run(row: str, best: float, last: float = 0.0, common: float = 0.0) -> dict[str, str]:
        figures = {"bmta_over_samples": best, "over_samples": last, "common_over_samples": common}
        return {"row": row, "column": column.name, "seed": "0"} | {name: str(value) for name, value in figures.items()}

    ran = [run("FedMCSA", 0.945, 0.93), run("FedAvg", 0.772), run("Local", 0.94), run("pFedMe", 0.89, 0.88, 0.75)]
    found = lines.leads(table, column, ran)
    assert {line.row: (line.printed, line.verdict) for line in found} == {
        "FedAvg": (16.86, "holds"),  # 94.5 - 77.2 = 17.3; no lead over Local is printed, and FedProx was not run
        "pFedMe": (10.53, "does not"),
        "pFedMe(GM)": (17.57, "holds"),  # the last round's, like the common model's figure: 93 - 75 = 18
    }
    assert lines.leads(table, column, ran[1:]) == []
    assert lines.leads(tables.load("fedmcsa-1"), column, ran) == []


@pytest.mark.parametrize("name", tables.names())
def test_the_rivals_of_a_column_are_run_before_who_may_be_harmed(name):
    table = tables.load(name)
    asked = [(cell.seed, cell.column.name, cell.row.method in paper.RIVALS) for cell in paper.cells(name, table, (), (), ())]
    for seed, column in {(seed, column) for seed, column, _ in asked}:
        rivals = [rival for *place, rival in asked if place == [seed, column]]
        assert rivals == sorted(rivals, reverse=True) and rivals[0], (seed, column)
        assert {"local", "fedavg"} <= {row.method for row in table.row}
