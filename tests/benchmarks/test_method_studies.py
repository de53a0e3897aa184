"""Studies of methods: a newcomer's course, and what a row of results says."""

from __future__ import annotations

from benchmarks import methods, newcomers


def test_a_newcomers_course_begins_with_its_first_model():
    def row(client, work, before, after):
        return {"client": client, "work": work, "accuracy_before": str(before), "accuracy_after": str(after)}

    rows = [
        row("a", "train", 0.1, 0.2),
        row("b", "train", 0.9, 0.9),
        row("a", "train", 0.3, 0.4),
        row("a", "evaluate", 0.5, 0.5),
    ]
    assert newcomers.course(rows, "a", trained=True) == [0.1, 0.2, 0.4]
    assert newcomers.course(rows, "a", trained=False) == [0.1, 0.3, 0.5]


def test_a_row_of_a_method_has_means_over_its_clients(monkeypatch):
    def client(accuracy, common, kept):
        known = {"accuracy": accuracy, "accuracy_common": common, "accuracy_local": None, "accuracy_constant": 0.1}
        return known | {"kept": kept}

    monkeypatch.setattr(methods, "harmed", lambda status: 1)
    status = {
        "method": "fedper", "model": "mlr", "round": 3, "accuracy": {"over_samples": 0.71234}, "constant": None,
        "clients": [client(0.5, 0.4, "personalized"), client(0.9, None, "common"), client(0.8, 0.8, "personalized")],
    }  # fmt: skip
    row = methods.row_of(status)
    assert set(methods.COLUMNS) - set(row) == {"seed", "seconds"}
    assert (row["mean_over_clients"], row["over_samples"], row["lowest"], row["common"]) == (0.7333, 0.7123, 0.5, 0.6)
    assert row["local"] is row["constant_over_samples"] is None and row["harmed"] == 0.3333
    assert row["kept"] == "common:1 personalized:2"
