"""Hospitals with 4 % events: AUROC against alone at each site with its test, the pooled line, and a site with too few cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import attune
from attune.fedclient.console import comparison_of
from attune.fedclient.messages import OrderResult
from attune.fedclient.work.comparison import newcombe
from attune.fedclient.work.evaluation import Evaluation
from attune.fedserver.view.homes import render_status


def hospital(seed: int, events: int, test: int = 1000) -> tuple[Any, ...]:
    """Return (x, y, test x, test y) with 40 events of 1,000 training samples and so many of the test samples."""
    draw, made = np.random.default_rng(seed), []
    for count, samples in ((40, 1000), (events, test)):
        y = draw.permutation(np.arange(samples) < count).astype(int)
        x = draw.normal(size=(samples, 6)) + 0.8 * y[:, None] * np.array([1, -1, 0.5, 0, 0, 0])
        made += [x.astype("float32"), y]
    return tuple(made)


SITES = {"bonn": hospital(0, 40), "kiel": hospital(1, 40), "ulm": hospital(2, 15), "tiny": hospital(3, 7, 175)}


@pytest.fixture(scope="module")
def evaluated() -> tuple[Any, dict[int, OrderResult]]:
    """Return the run and the last result of each device, by its number of test events."""
    results: dict[int, OrderResult] = {}
    usual = Evaluation.compared

    def compared(self: Evaluation, *given: Any) -> Any:
        answer = yield from usual(self, *given)
        results[answer[0].cases or 0] = answer[0]
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluation, "compared", compared)
        run = attune.simulate(
            SITES, "fedavg", "mlr", rounds=2, settings={"train.local_epochs": 1}, baseline="alone", progress=False
        )
    return run, results


def test_each_site_with_enough_cases_has_both_areas_and_their_test(evaluated: Any) -> None:
    run, _ = evaluated
    clients = {client["name"]: client for client in run.status["clients"]}
    for name in ("bonn", "kiel", "ulm"):
        client, (_, _, x, y) = clients[name], SITES[name]
        assert client["auroc_kept"] == pytest.approx(roc_auc_score(y, run.model(name).probabilities(x)[:, 1]), abs=1e-6)
        assert 0.6 < client["auroc_alone"] < 1 and 0 < client["auroc_p_alone"] <= 1 and 0 < client["auroc_error_alone"] < 0.2
        assert client["auroc_gain_alone"] == pytest.approx(client["auroc_kept"] - client["auroc_alone"])
    assert {name: value for name, value in clients["tiny"].items() if "auroc" in name and value is not None} == {}


def test_the_fleet_has_one_pooled_line_in_every_view(evaluated: Any, tmp_path: Path) -> None:
    run, _ = evaluated
    over, text = run.status["auroc"], render_status(run.status)
    gains = [client["auroc_gain_alone"] for client in run.status["clients"] if client["auroc_gain_alone"] is not None]
    assert over["sites"] == 3 and min(gains) <= over["gain"] <= max(gains)
    assert over["interval"][0] < over["gain"] < over["interval"][1] and over["prediction"] is None
    assert (
        "pooled over 3 sites; 1 more with too few cases, 95 % " in over["words"]
        and "new patients of these sites and these" in over["words"]
    )
    assert over["words"] in " ".join(text.split()) and "AUROC kept" in text
    run.save(tmp_path / "run")
    saved = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert saved["auroc"]["words"] == over["words"]
    assert {client["name"]: "auroc_kept" not in client["auroc"] for client in saved["clients"]} == {
        "bonn": False, "kiel": False, "ulm": False, "tiny": True,
    }  # fmt: skip


def test_the_device_says_its_areas_with_intervals_or_too_few_cases(evaluated: Any) -> None:
    _, results = evaluated
    assert "AUROC: too few cases (7 events)" in comparison_of(results[7])
    low, high = newcombe(results[15].auroc_kept, 15, 985)
    [line] = [line for line in comparison_of(results[15]) if line.startswith("AUROC")]
    assert line.startswith(f"AUROC: kept {results[15].auroc_kept:.3f} ({low:.3f} to {high:.3f}), alone ") and ", p = " in line
