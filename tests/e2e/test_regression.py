"""Regression over the network: from a site's table to predictions in the unit of its column."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.harness import FederationAt, tabular_shard


def site(path: Path, seed: int) -> Path:
    """Write a table with a dose that depends on three columns."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(80, 3))
    dose = 300 + 40 * (x @ [1.0, -0.5, 0.2]) + rng.normal(size=80)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("age", "weight", "pulse", "dose"), *(tuple(row) for row in np.c_[x, dose])])
    return path


def test_a_dose_is_predicted_from_a_table_to_a_file(federation_at: FederationAt, tmp_path: Path) -> None:
    federation = federation_at("doses")
    tables = [site(tmp_path / f"{name}.csv", seed) for seed, name in enumerate(("kiel", "ulm"))]
    shard = tmp_path / "shards" / "kiel"
    made = federation.command(
        "fedclient", "shard", str(tables[0]), "--label", "dose", "--task", "regression", "--out", str(shard)
    )
    assert "1 targets" in made.stdout
    flags = ("--exit-when-done", "--min-clients", "2", "--rounds", "3", "--set", "train.lr=0.05", "--set", "model.name=mlr")
    flags += ("--set", "train.local_epochs=25")
    server = federation.server("--method", "fedavg", *flags, "--set", "data.task=regression")
    odd = federation.device(tabular_shard(tmp_path / "odd", 1, features=3))
    assert odd.code() != 0
    assert "the shard of odd is for classes; this federation is for regression" in odd.text
    as_table = ("--label", "dose", "--task", "regression", "--baseline", "local")
    first, second = federation.device(shard, "--baseline", "local"), federation.device(tables[1], *as_table)
    assert [process.code() for process in (first, second, server)] == [0, 0, 0], server.text
    assert "R2 0.9" in server.text and "R2 0.9" in first.text
    status = federation.status()
    kiel = next(client for client in status["clients"] if client["name"] == "kiel")
    assert status["metric"] == "R2" and kiel["accuracy"] > 0.9 and kiel["interval"] is kiel["accuracy_constant"] is None
    assert 0 <= kiel["p_local"] <= 1 and kiel["verdict"] in ("better", "unclear", "worse")
    shown = federation.command("fedserver", "status", "--home", str(federation.home)).stdout
    assert "features and targets are standardised by each device's own statistics: neither 5 devices nor all of them" in shown
    assert "R2 (more is better: 1 is perfect, 0 no better than the mean): 0.9" in shown

    offline = json.loads(federation.command("fedclient", "evaluate", "--data", str(shard), "--json").stdout)
    assert offline["accuracy"] == pytest.approx(kiel["accuracy_kept"]) and offline["metric"] == "R2"
    out = tmp_path / "doses.csv"
    where = ("--home", str(federation.model(shard).parent))
    federation.command("fedclient", "predict", "--data", str(tables[0]), "--out", str(out), *where)
    rows = list(csv.DictReader(out.open(newline="")))
    truth = [float(row["dose"]) for row in csv.DictReader(tables[0].open(newline=""))]
    assert list(rows[0]) == ["index", "dose"] and len(rows) == 80
    assert np.mean(np.abs([float(row["dose"]) - true for row, true in zip(rows, truth, strict=True)])) < 10
    pictures = federation.command("fedserver", "plot", "--home", str(federation.home), "--out", str(tmp_path / "pictures"))
    assert "clients.png" in pictures.stdout
    pictures = federation.command("fedclient", "plot", "--data", str(shard), "--out", str(tmp_path / "numbers"), *where)
    assert "predicted.png" in pictures.stdout and "mean absolute error" in (tmp_path / "numbers" / "index.html").read_text()
