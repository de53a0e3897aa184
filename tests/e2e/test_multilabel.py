"""Several labels over the network: from a site's table to labels, verdicts and pictures, between processes over mutual TLS."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.harness import FederationAt, tabular_shard

LABELS = ("fever", "cough", "pain")


def site(path: Path, seed: int, sign: float) -> Path:
    """Write three labels of three columns. With sign -1 the last column has the opposite meaning, so sites need own models."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(160, 3))
    there = (x * [1.0, 1.0, sign] + 0.1 * rng.normal(size=x.shape) > 0).astype(int)
    with path.open("w", newline="") as file:
        rows = ((*numbers, *labels) for numbers, labels in zip(x, there, strict=True))
        csv.writer(file).writerows([("a", "b", "c", *LABELS), *rows])
    return path


def test_symptoms_are_told_from_a_table_to_pictures(federation_at: FederationAt, tmp_path: Path) -> None:
    federation = federation_at("symptoms")
    tables = [site(tmp_path / f"{name}.csv", seed, sign) for seed, (name, sign) in enumerate((("kiel", 1.0), ("ulm", -1.0)))]
    shard, labels = tmp_path / "shards" / "kiel", ("--label", ",".join(LABELS), "--task", "multilabel")
    made = federation.command("fedclient", "shard", str(tables[0]), *labels, "--out", str(shard))
    assert "3 labels" in made.stdout
    flags = ("--exit-when-done", "--min-clients", "2", "--rounds", "3", "--set", "model.name=mlr")
    flags += ("--set", "train.lr=0.5", "--set", "train.local_epochs=5")
    server = federation.server("--method", "fedavg+ft", *flags, "--set", "data.task=multilabel")
    odd = federation.device(tabular_shard(tmp_path / "odd", 1, features=3))
    assert odd.code() != 0
    assert "the shard of odd is for classes; this federation is for multilabel" in odd.text
    devices = [
        federation.device(*what, "--baseline", "local", "--disclose", "statistics") for what in ((shard,), (tables[1], *labels))
    ]
    assert [process.code() for process in (*devices, server)] == [0, 0, 0], server.text
    assert "label accuracy 0." in server.text

    status = federation.status()
    kiel = next(client for client in status["clients"] if client["name"] == "kiel")
    assert kiel["accuracy"] > 0.9 > kiel["accuracy_common"] + 0.05, "the common model cannot know what the last column means"
    assert status["metric"] == "label accuracy" and 0.4 < kiel["accuracy_constant"] < 0.7
    assert kiel["p_common"] < 0.05 and (kiel["verdict"] in ("better", "unclear") or kiel["accuracy_local"] > kiel["accuracy"])
    shown = federation.command("fedserver", "status", "--home", str(federation.home)).stdout
    assert "label accuracy (more is better: share of labels that are right)" in shown

    offline = json.loads(federation.command("fedclient", "evaluate", "--data", str(shard), "--json").stdout)
    assert (offline["accuracy"], offline["metric"]) == (pytest.approx(kiel["accuracy_kept"]), "label accuracy")
    out, where = tmp_path / "found.csv", ("--home", str(federation.model(shard).parent))
    federation.command("fedclient", "predict", "--data", str(tables[0]), "--out", str(out), *where)
    rows = list(csv.DictReader(out.open(newline="")))
    truth = list(csv.DictReader(tables[0].open(newline="")))
    assert list(rows[0]) == ["index", *LABELS] and len(rows) == 160
    right = [[row[label] == true[label] for label in LABELS] for row, true in zip(rows, truth, strict=True)]
    assert np.mean(right) > 0.9

    folder = tmp_path / "pictures"
    drawn = federation.command("fedclient", "plot", "--data", str(shard), "--out", str(folder), *where)
    assert "labels.png" in drawn.stdout and "Accuracy by label" in (folder / "index.html").read_text()
    drawn = federation.command("fedserver", "plot", "--home", str(federation.home), "--out", str(folder / "server"))
    assert "clients.png" in drawn.stdout and "label accuracy" in (folder / "server" / "index.html").read_text()
