"""Survival over the network: from sites' tables to the C-index in the status, and to log hazards of new patients."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.e2e.harness import FederationAt
from tests.simulation.test_survival import cohort, write


def test_sites_learn_who_is_at_risk(federation_at: FederationAt, tmp_path: Path) -> None:
    federation = federation_at("survival")
    tables = [write(tmp_path / f"{name}.csv", cohort(2 * site)) for site, name in enumerate(("kiel", "ulm"))]
    flags = ("--exit-when-done", "--min-clients", "2", "--rounds", "3", "--set", "train.lr=0.05")
    flags += ("--set", "train.local_epochs=25")
    server = federation.server("--method", "fedavg", *flags)
    odd = federation.device(tables[0], "--label", "months", "--task", "survival", name="odd")
    assert odd.code() != 0 and "--task survival needs two columns" in odd.text
    asked = ("--label", "months,died", "--task", "survival", "--schema", "auto", "--baseline", "local")
    home = tmp_path / "home"
    first = federation.device(tables[0], *asked, "--home", str(home), name="kiel")
    second = federation.device(tables[1], *asked, name="ulm")
    assert [process.code() for process in (first, second, server)] == [0, 0, 0], server.text
    assert "C-index 0." in server.text and "C-index 0." in first.text
    status = federation.status()
    kiel = next(client for client in status["clients"] if client["name"] == "kiel")
    assert status["metric"] == "C-index" and kiel["accuracy"] > 0.65 and kiel["accuracy_local"] is not None
    assert kiel["interval"] is kiel["verdict"] is kiel["p_local"] is None
    shown = federation.command("fedserver", "status", "--home", str(federation.home)).stdout
    assert "C-index (more is better: 1 is perfect, 0.5 no better than chance): 0." in shown
    where = ("--data", str(tables[0]), "--home", str(home))
    offline = json.loads(federation.command("fedclient", "evaluate", "--json", *where).stdout)
    assert offline["accuracy"] == pytest.approx(kiel["accuracy"]) and offline["metric"] == "C-index"
    out = tmp_path / "risks.csv"
    federation.command("fedclient", "predict", "--out", str(out), *where)
    rows = list(csv.DictReader(out.open(newline="")))
    assert list(rows[0]) == ["index", "log hazard"] and len(rows) == 120
    pictures = federation.command("fedserver", "plot", "--home", str(federation.home), "--out", str(tmp_path / "pictures"))
    assert "accuracy.png" in pictures.stdout and "a C-index is no mean over test samples" in pictures.stdout


def test_statistics_have_the_survival_of_the_fleet(federation_at: FederationAt, tmp_path: Path) -> None:
    lifelines = pytest.importorskip("lifelines")
    federation = federation_at("statistics")
    cohorts = {f"site{site}": cohort(site) for site in range(5)}
    tables = [write(tmp_path / f"{name}.csv", rows) for name, rows in cohorts.items()]
    federation.server("--method", "fedavg", "--min-clients", "9")
    asked = ("--label", "months,died", "--task", "survival", "--schema", "auto", "--disclose", "statistics")
    federation.fleet(tables, *asked)
    federation.await_status(lambda status: [client["state"] for client in status["clients"]].count("idle") == 5)
    command = ("fedserver", "statistics", "--home", str(federation.home), "--json", "--out", str(tmp_path / "page"))
    found = json.loads(federation.command(*command).stdout)
    months, died = zip(*[row[-2:] for rows in cohorts.values() for row in rows], strict=True)
    assert found["columns"]["time months"]["rows"] == 600 and found["columns"]["event died"]["rows"] == sum(died)
    shown = found["survival"]
    assert shown["at_risk"][0] == 600 and min(shown["events"]) >= 10 and (tmp_path / "page" / "survival.png").exists()
    fitted = lifelines.KaplanMeierFitter().fit(months, died)
    assert shown["survival"] == pytest.approx(fitted.predict(shown["times"]).to_list(), abs=0.05)
