"""`fedserver privacy`: the budget of a run, and what devices report as spent."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import attune
from attune.fedserver.cli.root import cli


@pytest.mark.parametrize("unit", ["none", "example"])
def test_the_budget_and_what_was_spent_are_shown(unit: str, tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    draws = np.random.default_rng(0)
    shards = {name: (draws.random((60, 4)).astype("float32"), np.arange(60) % 2) for name in ("ann", "ben")}
    privacy = {"unit": unit, "epsilon": 4.0, "insecure_seed": 1, "ranges": [[0, 1]]}
    settings = {"privacy": privacy, "train": {"local_epochs": 1}}
    attune.simulate(shards, method="fedavg", model="mlr", rounds=2, settings=settings, progress=False, home=tmp_path / "home")
    home = next(path.parent for path in (tmp_path / "home").rglob("state.sqlite"))
    text, report = (CliRunner().invoke(cli, ["privacy", "--home", str(home), *more]).output for more in ([], ["--json"]))
    shown = json.loads(report)
    assert (shown["unit"], shown["epsilon"]) == (unit, 4.0)
    if unit == "none":
        assert "devices train without noise" in text
        assert shown["spent"] == {"ann": None, "ben": None}
    else:
        assert "for each example: budget epsilon = 4 at delta = 1e-05, 2 orders at most" in text
        assert "ann  spent epsilon = 4" in text
        assert all(3.9 < spent <= 4 for spent in shown["spent"].values())
