"""Scores that `fedclient evaluate` adds: by hand, by double sums, and of models that a federation has left."""

import math
from typing import Any

import numpy as np
import pytest

import attune
from attune.common.statistics import wilson
from attune.fedclient.data.shard import load_shard
from attune.fedclient.model.scores import TestPartScore as Score
from attune.fedclient.model.scores import at_threshold, integrated_brier, of_classes, of_numbers, scores_on
from attune.fedclient.work.auroc import threshold_of


def test_fifty_samples_by_hand() -> None:
    """15 of 20 events have a probability of 0.8, and 6 of 30 others; the rest has 0.2."""
    share_N = np.repeat([0.8, 0.2, 0.8, 0.2], [15, 5, 6, 24])
    shares, y = np.stack([1 - share_N, share_N], axis=1), np.repeat([1, 0], [20, 30])
    scores = of_classes(shares, y, None, 0.5)
    assert 0.5 < scores["AUROC low"] < scores["AUROC"] < scores["AUROC high"] < 1
    expected = {
        "AUROC": (15 * 24 + 0.5 * (15 * 6 + 5 * 24)) / 600, "balanced accuracy": (15 / 20 + 24 / 30) / 2,
        "F1": 2 * 15 / (2 * 15 + 6 + 5), "Brier score": (39 * 0.2**2 + 11 * 0.8**2) / 50,
        "log loss": -(39 * math.log(0.8) + 11 * math.log(0.2)) / 50,
        "average precision": 15 / 20 * 15 / 21 + 5 / 20 * 20 / 50,
        "observed minus expected": 20 / 50 - (21 * 0.8 + 29 * 0.2) / 50, "sensitivity": 15 / 20, "specificity": 24 / 30,
    }  # fmt: skip
    assert {name: scores[name] for name in expected} == pytest.approx(expected)
    slope = (math.log(15 / 6) - math.log(5 / 24)) / (2 * math.log(4))  # both groups of samples are fitted exactly
    assert scores["slope of calibration"] == pytest.approx(slope, rel=1e-3)
    assert (scores["sensitivity low"], scores["sensitivity high"]) == wilson(15 / 20, 20)
    assert (scores["specificity low"], scores["specificity high"]) == wilson(24 / 30, 30)
    by_groups = at_threshold(share_N > 0.5, y == 1, np.arange(50) // 2)
    assert (by_groups["sensitivity low"], by_groups["specificity high"]) == (wilson(15 / 20, 10)[0], wilson(24 / 30, 15)[1])
    assert "threshold" not in of_classes(shares, y, None, None)


def test_the_threshold_gives_the_largest_sum_of_sensitivity_and_specificity() -> None:
    share_N, event_N = np.array([0.1, 0.2, 0.3, 0.4, 0.9]), np.array([False, False, True, False, True])
    assert threshold_of(share_N, event_N) == 0.3  # 2 of 2 and 2 of 3; at 0.9 it is 1 of 2 and 3 of 3


def test_errors_of_numbers_by_hand() -> None:
    scores = of_numbers(np.array([[1.0], [2.0], [5.0]]), np.array([[2.0], [2.0], [3.0]]))
    expected = {"MAE": 1, "RMSE": math.sqrt(5 / 3), "pinball 0.1": (0.9 + 0.1 * 2) / 3, "pinball 0.9": (0.1 + 1.8) / 3}
    assert scores == pytest.approx(expected)


def slow_brier(train: Any, test: Any, train_hazard: Any, test_hazard: Any) -> float:
    """Return the integrated Brier score by its definition, sample by sample and time by time."""

    def uncensored(time: float, before: bool) -> float:
        share = 1.0
        for at in sorted({t for t, event in train if not event and (t < time or (t == time and not before))}):
            risk = sum(t > at or (t == at and not event) for t, event in train)
            share *= 1 - sum(t == at and not event for t, event in train) / risk
        return max(share, 1e-12)

    def alive(time: float, hazard: float) -> float:
        base = 0.0
        for at, event in train:
            if event and at <= time:
                base += 1 / sum(math.exp(h) for (t, _), h in zip(train, train_hazard, strict=True) if t >= at)
        return math.exp(-base * math.exp(hazard))

    times = sorted({t for t, _ in test})[:-1]
    scores = []
    for time in times:
        total = 0.0
        for (t, event), hazard in zip(test, test_hazard, strict=True):
            if t > time:
                total += (1 - alive(time, hazard)) ** 2 / uncensored(time, False)
            elif event:
                total += alive(time, hazard) ** 2 / uncensored(t, True)
        scores.append(total / len(test))
    area = sum((a + b) / 2 * (t - s) for a, b, s, t in zip(scores, scores[1:], times, times[1:], strict=False))
    return area / (times[-1] - times[0])


@pytest.mark.parametrize("seed", range(3))
def test_the_integrated_brier_score_is_that_of_its_definition(seed: int) -> None:
    draw = np.random.default_rng(seed)
    train, test = (np.stack([draw.integers(1, 15, n), draw.random(n) < 0.6], axis=1).astype(float) for n in (40, 30))
    hazards = draw.normal(size=40), draw.normal(size=30)
    assert integrated_brier(train, test, *hazards) == pytest.approx(slow_brier(train.tolist(), test.tolist(), *hazards))


def test_models_of_a_federation_have_their_scores_on_the_device_alone(tmp_path: Any) -> None:
    draw = np.random.default_rng(0)
    sites = {}
    for name, events in (("bonn", 30), ("kiel", 30), ("tiny", 7)):
        y = np.arange(500) % 10 == 0, draw.permutation(np.arange(200) < events)
        x = [draw.normal(size=(len(of), 4)).astype("float32") + of[:, None] for of in y]
        sites[name] = (x[0], y[0].astype(int), x[1], y[1].astype(int))
        np.savez(tmp_path / f"{name}.npz", train_x=x[0], train_y=y[0].astype(int), test_x=x[1], test_y=y[1].astype(int))
    run = attune.simulate(
        sites, "fedavg", "mlr", rounds=2, settings={"train.local_epochs": 1}, baseline="alone", progress=False
    )
    scores = {name: scores_on(run.model(name), load_shard(tmp_path / f"{name}.npz")) for name in sites}
    assert scores["tiny"] == "too few cases (7 events)"
    bonn = scores["bonn"]
    assert isinstance(bonn, dict) and bonn["threshold"] == run.model("bonn").info.threshold
    assert bonn["AUROC"] == pytest.approx(next(c["auroc_kept"] for c in run.status["clients"] if c["name"] == "bonn"), abs=1e-6)
    said = str(Score("bonn", "fedavg", 0.9, 200, 2, "common", "fedavg", scores=bonn))
    assert f"accuracy 0.9000 on 200 test samples; AUROC {bonn['AUROC']:.4f}, AUROC low " in said and "sensitivity" in said
