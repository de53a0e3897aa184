"""`train.score`: what verdicts and tables of rare events show, and that it changes nothing else."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import attune
from attune.common.config import TrainSettings
from attune.common.errors import SettingError
from attune.common.metrics import Metrics, read_metrics
from attune.common.plan import Profile
from attune.fedclient.console import comparison_of
from attune.fedclient.data.labels import is_rare
from attune.fedclient.messages import OrderResult
from attune.fedclient.work.auroc import newcombe
from attune.fedclient.work.evaluation import Evaluation
from attune.fedserver.core.ballot import score_of
from attune.fedserver.view.homes import render_status


def clinic(seed: int, test_events: int) -> tuple[Any, ...]:
    """Return (x, y, test x, test y): 8 % events of 500 training samples, and so many of 300 test samples."""
    draw, made = np.random.default_rng(seed), []
    for count, samples in ((40, 500), (test_events, 300)):
        y = draw.permutation(np.arange(samples) < count).astype(int)
        x = draw.normal(size=(samples, 5)) + y[:, None] * np.array([1.0, -1, 0.5, 0, 0])
        made += [x.astype("float32"), y]
    return tuple(made)


SITES = {f"clinic{at}": clinic(at, events) for at, events in enumerate((25, 24, 23, *[6] * 5))}
LARGE, SMALL = list(SITES)[:3], list(SITES)[3:]


def trained(score: str | None) -> Any:
    settings = {"train.local_epochs": 1} | ({"train.score": score} if score else {})
    return attune.simulate(SITES, "fedavg", "mlr", rounds=2, settings=settings, baseline="alone", progress=False)


@pytest.fixture(scope="module")
def evaluated() -> tuple[Any, dict[int, OrderResult]]:
    """Return the run, and the last result of a device by its number of test events."""
    results: dict[int, OrderResult] = {}
    usual = Evaluation.compared

    def compared(self: Evaluation, *given: Any) -> Any:
        answer = yield from usual(self, *given)
        results[answer[0].cases or 0] = answer[0]
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluation, "compared", compared)
        return trained(None), results


@pytest.fixture(scope="module")
def ranked(evaluated: Any) -> Any:
    return evaluated[0]


def test_rare_events_are_scored_by_auroc_and_the_plan_says_why(ranked: Any) -> None:
    why = "models are scored by AUROC: one of two classes has less than 20% of the samples at 8 of 8 sites"
    assert (ranked.status["metric"], ranked.status["score"]) == ("AUROC", why)
    assert why in render_status(ranked.status)
    clients = {client["name"]: client for client in ranked.status["clients"]}
    for name in LARGE:
        client, (_, _, x, y) = clients[name], SITES[name]
        area = roc_auc_score(y, ranked.model(name).probabilities(x)[:, 1])
        assert client["accuracy_kept"] == pytest.approx(area, abs=1e-6) == client["auroc_kept"]
        assert client["auroc_low"] < area < client["auroc_high"] and client["interval"] is None
        assert client["kept_gain_alone"] == pytest.approx(client["accuracy_kept"] - client["accuracy_alone"])
        assert (client["kept_gain_alone"], client["kept_p_alone"]) == (client["auroc_gain_alone"], client["auroc_p_alone"])
        assert client["verdict"] in ("better", "worse", "unclear") and client["kept_better_than_alone"] is None


def test_most_clinics_say_too_few_cases_and_the_fleet_has_an_answer(ranked: Any) -> None:
    rows = {row.device: row for row in ranked.table()}
    assert [name for name, row in rows.items() if row.verdict == "too few cases"] == SMALL
    told = {client["name"]: {k for k in client if client[k] is not None} for client in ranked.status["clients"]}
    numbers = ("accuracy_", "auroc_", "gain_", "error_", "p_", "kept_")
    assert not [key for name in SMALL for key in told[name] if key.startswith(numbers) and key != "accuracy_constant"]
    assert "pooled over 3 sites; 5 more with too few cases, 95 % " in render_status(ranked.status)
    assert [client["name"] for client in ranked.summary["clients"] if client["verdict"] == "too few cases"] == SMALL


def test_views_have_the_pooled_effect_and_devices_say_their_areas(evaluated: Any, tmp_path: Path) -> None:
    run, results = evaluated
    over, gains = run.status["auroc"], [results[events].auroc_gain_alone for events in (25, 24, 23)]
    assert min(gains) <= over["gain"] <= max(gains) and over["interval"][0] < over["gain"] < over["interval"][1]
    saved = json.loads((run.save(tmp_path / "run") / "summary.json").read_text())
    assert saved["auroc"]["words"] == over["words"] and over["words"] in render_status(run.status)
    assert [sorted(client["auroc"]) == [] for client in saved["clients"]] == [False] * 3 + [True] * 5
    assert "AUROC: too few cases (6 events)" in comparison_of(results[6])
    low, high = newcombe(results[25].auroc_kept or 0.0, 25, 275)
    [line] = [line for line in comparison_of(results[25]) if line.startswith("AUROC:")]
    assert line.startswith(f"AUROC: kept {results[25].auroc_kept:.3f} ({low:.3f} to {high:.3f}), alone ") and ", p = " in line


def test_the_score_changes_no_model_and_no_weight(ranked: Any) -> None:
    by_accuracy = trained("accuracy")
    assert (by_accuracy.status["metric"], by_accuracy.status["score"]) == ("accuracy", None)
    assert [row.keeps for row in by_accuracy.table()] == [row.keeps for row in ranked.table()]
    for name, (_, _, x, _) in SITES.items():
        assert np.array_equal(by_accuracy.model(name).probabilities(x), ranked.model(name).probabilities(x))
    names = ("likelihood_personalized", "likelihood_alone", "auroc_gain_alone")
    both = [[[client[name] for name in names] for client in run.status["clients"]] for run in (by_accuracy, ranked)]
    assert both[0] == both[1] and by_accuracy.status["auroc"] == ranked.status["auroc"]


@pytest.mark.parametrize(
    ("score", "rare", "classes", "expected"),
    [
        ("auto", 2, 2, "auroc"), ("auto", 1, 2, ""), ("accuracy", 3, 2, ""), ("auroc", 0, 2, "auroc"), ("auto", 3, 3, ""),
        (msgspec.UNSET, 2, 2, "auroc"),
    ],
)  # fmt: skip
def test_the_plan_has_auroc_where_most_sites_have_rare_events(score: Any, rare: int, classes: int, expected: str) -> None:
    sites = [
        Profile("tabular", (3,), list(range(classes)), 50, 20, rare=True if at < rare else msgspec.UNSET) for at in range(3)
    ]
    planned = score_of(TrainSettings(score=score), list(range(classes)), sites)
    assert planned.get("score", "") == expected
    assert ("at 2 of 3 sites" in planned.get("rare", "")) == (rare == 2 and bool(expected))


def test_auroc_of_other_than_two_classes_is_refused_by_name() -> None:
    for classes, more in (([0, 1, 2], {}), (["y"], {"task": "regression"}), ([0, 1], {"per_position": True})):
        with pytest.raises(SettingError, match="is for two classes with one label"):
            score_of(TrainSettings(score="auroc"), classes, [Profile("tokens", (3,), classes, 50, 20, **more)])


@pytest.mark.parametrize(
    ("counts", "rare"), [((19, 81), True), ((81, 19), True), ((20, 80), None), ((1, 8), None), ((5, 5, 90), None)]
)
def test_a_device_says_one_bit_of_its_classes(counts: tuple[int, ...], rare: bool | None) -> None:
    y = np.repeat(np.arange(len(counts)), counts)
    assert is_rare(y, list(range(len(counts)))) is (msgspec.UNSET if rare is None else rare)


def test_scores_of_an_earlier_device_are_no_aurocs() -> None:
    said = {"accuracy_before": 0.96, "accuracy_kept": 0.97, "kept_better_than_alone": 3, "kept_gain_alone": 0.1, "loss": 0.2}
    old, new = (read_metrics(msgspec.json.encode(said | more), "kiel", "ranked") for more in ({}, {"ranked": 1}))
    assert old == Metrics(loss=0.2) and (new.accuracy_before, new.kept_gain_alone) == (0.96, 0.1)
    assert read_metrics(msgspec.json.encode(said), "kiel").accuracy_before == 0.96
