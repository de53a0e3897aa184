"""Studies of methods: a newcomer's course by hand and measured, and what a row of results says."""

import csv

from click.testing import CliRunner

from benchmarks import newcomers


def row(client, work, before, after=""):
    return {"client": client, "work": work, "accuracy_before": before, "accuracy_after": after}


ROWS = [
    row("old-a", "train", "0.1", "0.2"), row("new-a", "train", "0.3", "0.5"), row("new-a", "train", "0.4", "0.7"),
    row("new-a", "evaluate", "0.6"), row("new-ab", "train", "0.9", "0.9"),
]  # fmt: skip


def test_models_are_judged_after_training_or_as_they_are_served_next():
    assert newcomers.course(ROWS, "new-a", trained=True) == [0.3, 0.5, 0.7]
    assert newcomers.course(ROWS, "new-a", trained=False) == [0.3, 0.4, 0.6]


def test_a_small_case_measures_each_round_of_the_newcomers(tmp_path):
    out = tmp_path / "newcomers.csv"
    words = ["--partition", "--scheme pathological --clients 5 --classes-per-client 2", "--new", "1"]
    words += ["--case", "fedper:personal", "--rounds", "1", "--adapt-rounds", "2", "--set", "model.name=mlr"]
    for _ in range(2):  # the second time, nothing is left to run
        done = CliRunner().invoke(newcomers.main, [*words, "--out", str(out)], catch_exceptions=False)
        assert done.exit_code == 0, done.output
    [found] = list(csv.DictReader(out.read_text().splitlines()))
    assert 0 <= float(found["first_model"]) < float(found["after_2"]) <= 1
    assert found["method"] == "fedper"
    assert float(found["after_1"]) > 0.5, "a head of two digits is fitted in one round"
