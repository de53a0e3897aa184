"""`fedserver privacy`: the budget of a run, and what devices report as spent."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import attune
from attune.common.plan import run_name
from attune.fedserver import runs
from attune.fedserver.cli.root import cli
from attune.fedserver.core.records import Report
from attune.fedserver.home import ServerHome
from attune.fedserver.view.status import spent_epsilons


def ran(folder: Path, privacy: dict[str, Any], **settings: dict[str, Any]) -> Path:
    """Simulate two devices over two rounds, and return the server's home."""
    draws = np.random.default_rng(0)
    shards = {name: (draws.random((60, 4)).astype("float32"), np.arange(60) % 2) for name in ("ann", "ben")}
    given = {"privacy": privacy, "train": {"local_epochs": 1}, **settings}
    attune.simulate(shards, method="fedavg", model="mlr", rounds=2, settings=given, progress=False, home=folder)
    return next(path.parent for path in folder.rglob("state.sqlite"))


def report_of(home: Path) -> tuple[str, dict[str, Any]]:
    text, shown = (CliRunner().invoke(cli, ["privacy", "--home", str(home), *more]).output for more in ([], ["--json"]))
    return text, json.loads(shown)


@pytest.mark.parametrize("unit", ["none", "example", "noise"])
def test_the_budget_and_what_was_spent_are_shown(unit: str, tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    privacy = {"unit": unit, "epsilon": 4.0, "insecure_seed": 1, "ranges": [[0, 1]]}
    if unit == "noise":
        privacy |= {"unit": "example", "epsilon": None, "noise": 2.0}
    text, shown = report_of(ran(tmp_path, privacy))
    assert (shown["unit"], shown["epsilon"]) == (privacy["unit"], privacy["epsilon"])
    if unit == "noise":  # both orders were carried out, so what was planned is spent
        assert shown["planned"].keys() == shown["spent"].keys() == {"ann", "ben"}
        for name, planned in shown["planned"].items():
            assert planned == pytest.approx(shown["spent"][name], rel=1e-6) and planned > 0.1
            assert f"{name}  spent epsilon = {planned:.3g}, planned {planned:.3g}" in text
        return
    if unit == "none":
        assert "devices train without noise" in text
        assert shown["spent"] == {"ann": None, "ben": None} and not shown["mode"]
    else:
        assert "for each example: budget epsilon = 4 at delta = 1e-05, 2 orders at most" in text
        assert "ann  spent epsilon = 4, planned 4" in text
        assert "noise on the devices: the server sees updates that were trained with noise" in text
        assert all(3.9 < spent <= 4 for spent in shown["spent"].values())


@pytest.mark.parametrize("unit", ["example", "client"])
def test_what_earlier_runs_have_spent_is_shown(unit: str, tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    privacy = {"unit": unit, "epsilon": 4.0, "insecure_seed": 1}
    privacy |= {"ranges": [[0, 1]]} if unit == "example" else {"delta": 0.01, "devices": 2}
    folder = ran(tmp_path, privacy, train={"local_epochs": 1, "validation": 0.0}, data={"classes": [0, 1]})
    home, run = ServerHome(folder), run_name(ServerHome(folder).snapshot().run)
    first = report_of(folder)[1]
    runs.begin(home, "second", {"privacy": {"unit": "none", "epsilon": None, "devices": 0}}, "ada")
    text, shown = report_of(folder)
    [earlier] = shown["earlier"]
    assert first["earlier"] == [] and earlier["run"] == run and earlier["mode"] == first["mode"]
    assert "devices train without noise" in text
    if unit == "client":
        assert earlier["released"] == first["released"] and earlier["released"]["spent"] > 3.9 and earlier["spent"] == {}
        assert (
            f"earlier run {run}: privacy: by device, epsilon = {earlier['released']['spent']:.3g} spent on 2 released" in text
        )
    else:
        assert earlier["spent"] == first["spent"] and earlier["released"] is None
        assert f"after the earlier run {run} spent epsilon = 4" in text and "ann" in text


def test_a_device_that_reports_less_than_before_is_named() -> None:
    """Expect a warning and the most that was reported: spending never falls, so an older ledger was restored."""
    reported = {"ann": [1.0, 2.0, 1.5], "ben": [1.0, 1.0 - 1e-9, 2.0], "cai": [None, 1.0]}
    rows = [
        Report(round=number, work="train", client=name, epsilon=epsilon)
        for name, values in reported.items()
        for number, epsilon in enumerate(values)
    ]
    assert spent_epsilons(rows) == ({"ann": 2.0, "ben": 2.0, "cai": 1.0}, ["ann"])


def test_secure_aggregation_and_what_the_server_sees_are_shown(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    shards = {name: (draws.random((20, 4)).astype("float32"), np.arange(20) % 2) for name in ("ann", "ben", "cai")}
    settings = {
        "privacy": {"secure_aggregation": True, "secure_devices": 3},
        "train": {"local_epochs": 1, "evaluate": False},
        "round": {"take_back": 0.0},
        "method": {"bound_change": 0.0, "bound_samples": 0.0},
    }
    result = attune.simulate(
        shards, method="fedavg", model="mlr", rounds=1, settings=settings, progress=False, home=tmp_path / "home"
    )
    text = CliRunner().invoke(cli, ["privacy", "--home", str(tmp_path / "home/server")]).output
    words = "the server sees sums of at least 3 updates, and no single one"
    clipped = (
        "0 of 3 devices clipped their update in round 1; privacy.secure_clip = 1, and no number changed by more than 0.125"
    )
    assert text == f"secure aggregation: {words}\n{clipped}\n"
    carried = result.model("ann").info.privacy
    assert (carried.unit, carried.mode, carried.visible, carried.planned) == ("none", "secure aggregation", words, None)
    assert (carried.epsilon, carried.finished) == (None, sorted(result.model("ann").members))
