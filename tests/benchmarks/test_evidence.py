"""Figures of docs/does-it-help.md about probable help, from the committed calibration, and the program that makes it."""

import csv
import re

from click.testing import CliRunner

from attune.fedserver.core.evidence import THRESHOLD
from benchmarks import evidence
from tests.docs.conftest import ROOT


def test_the_document_has_the_figures_of_the_calibration():
    rows = list(csv.DictReader((ROOT / "benchmarks/results/evidence.csv").open()))
    judged = [row for row in rows if float(row["threshold"]) == THRESHOLD]
    used = [row for row in judged if row["test"] == "all"]
    wrong = max(float(row["wrong_share"]) for row in used if row["without_effect"] in ("0.5", "0.3"))
    called = max(float(row["called_share"]) for row in used if row["without_effect"] == "1.0")
    assert wrong <= 0.05
    text = " ".join((ROOT / "docs/does-it-help.md").read_text().split())
    assert re.search(r"at most ([\d.]+) % of the calls were wrong", text)[1] == f"{100 * wrong:.2f}"
    assert re.search(r"at most ([\d.]+) % of the devices were called", text)[1] == f"{100 * called:.2f}"
    figures = r"([\d.]+) % of the calls were wrong with 12 test samples, ([\d.]+) % with 20, ([\d.]+) % with 50 and ([\d.]+) %"
    found = re.search(figures, text)
    for size, figure in zip(("12", "20", "50", "200"), found.groups(), strict=True):
        half = [row for row in judged if (row["scores"], row["without_effect"], row["test"]) == ("counts", "0.5", size)]
        assert figure == f"{100 * sum(int(row['wrong']) for row in half) / sum(int(row['called']) for row in half):.1f}"


def test_the_program_writes_a_row_for_each_kind_of_fleet(tmp_path, monkeypatch):
    for name in ("SHARES", "SAMPLES", "GAINS", "GROUPS", "DEVICES"):
        monkeypatch.setattr(evidence, name, getattr(evidence, name)[:1])
    done = CliRunner().invoke(evidence.main, ["--out", str(tmp_path / "out.csv"), "--repeats", "1"], catch_exceptions=False)
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert done.exit_code == 0 and len(rows) == 2 * 2 * len(evidence.NONE) * len(evidence.THRESHOLDS)
    assert {row["test"] for row in rows} == {"all", "12", "8"}
    assert {row["judged"] for row in rows} == {"9"}
