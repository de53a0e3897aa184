"""Whole federations of regression and of several labels: better than a constant answer, stacked, saved and exported."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import attune
from attune.common.errors import SettingError, ShapeMismatch
from attune.fedclient.model import artifact, portable
from attune.fedclient.model.artifact import Model

QUICK = {"train.lr": 0.05, "train.batch_size": 16, "train.local_epochs": 3}


def device(number: int, task: str) -> tuple[np.ndarray, np.ndarray]:
    """Return two outputs that depend on four columns; the first column's effect differs between devices."""
    rng = np.random.default_rng(9 + number)
    x = rng.normal(size=(80, 4)).astype(np.float32)
    z = x @ np.array([[0.0, 1.0], [1.0, -1.0], [0.5, 1.0], [-1.0, 0.0]]) + number * x[:, :1] + 0.2 * rng.normal(size=(80, 2))
    return x, 300 + 20 * z if task == "regression" else (z > 0).astype(np.int64)


def run(task: str, executor: Any = None, method: str = "fedper", rounds: int = 4, **more: Any) -> attune.Result:
    shards = {f"site{number}": device(number, task) for number in (-1, 0, 1)}
    settings = QUICK | more.pop("settings", {})
    return attune.simulate(
        shards, method, rounds=rounds, task=task, settings=settings, baseline="local", executor=executor, progress=False, **more
    )


@pytest.mark.parametrize("task", ["regression", "multilabel"])
def test_devices_beat_the_constant_answer_and_stacked_ones_agree_to_rounding(task):
    plain, stacked = run(task), run(task, "stacked")
    for one, other in zip(plain.table(), stacked.table(), strict=True):
        assert (one.accuracy, one.local) == pytest.approx((other.accuracy, other.local), rel=1e-4)
        assert one.verdict == other.verdict and (one.interval is None) == (task == "regression")
    for line in plain.status["clients"]:
        assert line["accuracy"] > line["accuracy_constant"] + 0.2, line
        assert line["p_local"] is not None and line["gain_local"] == pytest.approx(line["accuracy"] - line["accuracy_local"])
    assert plain.status["metric"] == {"regression": "R2", "multilabel": "label accuracy"}[task]


def test_predictions_are_in_the_unit_of_y_and_survive_saving_and_exporting(tmp_path):
    """Use a blend, which has the weights of both models."""
    result = run("regression")
    model, (x, y) = result.model("site0"), device(0, "regression")
    found = np.array(model.predict(x))
    assert found.shape == y.shape and model.info.weights.keys() == {"personalized", "local"}
    assert 1 - ((found - y) ** 2).mean() / y.var(axis=0).mean() > 0.8
    folder = artifact.save(tmp_path / "model", model.info, {name: each.tensors for name, each in model.members.items()})
    again = Model.load(folder)
    assert again.predict(x[:3]) == model.predict(x[:3])
    assert portable.export(again, tmp_path / "out.pt2") <= portable.TOLERANCE
    assert portable._run_program(tmp_path / "out.pt2", x[:5]) == pytest.approx(found[:5], rel=1e-4)


def test_a_model_of_labels_answers_zeros_and_ones_and_exports_probabilities(tmp_path):
    model, (x, y) = run("multilabel").model("site1"), device(1, "multilabel")
    found = np.array(model.predict(x))
    assert set(found.flatten()) <= {0, 1} and (found == y).mean() > 0.8
    assert portable.export(model, tmp_path / "out.pt2") <= portable.TOLERANCE
    assert ((portable._run_program(tmp_path / "out.pt2", x) > 0.5) == (found == 1)).all()


def test_a_blend_predicts_the_weighted_mean_of_its_models():
    model, (x, _) = run("regression").model("site1"), device(1, "regression")
    both = dict(model.members)
    predicted = {}
    for name in both:
        model.members = {name: both[name]}
        predicted[name] = np.array(model.predict(x[:4]))
    model.members = both
    mean = sum(model.info.weights[name] * each for name, each in predicted.items())
    assert np.array(model.predict(x[:4])) == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize("method", ["fedtp", "pfedme", "per-fedavg", "ditto", "fedavg+ft"])
def test_methods_of_every_kind_run(method):
    small = {"model.width": 8, "model.depth": 1, "method.hidden": 8} if method == "fedtp" else {}
    result = run("regression", method=method, rounds=1, settings={"train.local_epochs": 1, **small})
    assert all(row.accuracy is not None and -1 <= row.accuracy <= 1 for row in result.table())


def test_a_method_for_classes_and_a_device_of_another_task_end_it_before_it_begins(tmp_path):
    with pytest.raises(SettingError, match="method fedrod cannot be used for multilabel"):
        run("multilabel", method="fedrod")
    for name, task in (("a", "regression"), ("b", "regression"), ("odd", "multilabel")):
        x, y = device(0, task)
        (tmp_path / name).mkdir()
        np.savez(tmp_path / name / "train.npz", x=x, y=y)
        (tmp_path / name / "meta.json").write_text(json.dumps({"task": task}))
    with pytest.raises(ShapeMismatch, match=r"odd is for multilabel of 2 labels \(0, 1\); this federation is for reg"):
        attune.simulate(str(tmp_path / "*"), "fedavg", rounds=1, progress=False)


def test_a_loop_and_scores_of_ones_own():
    """Use y in standard deviations of the federation, and scores from 0 to 1 as for every task."""
    import torch
    from torch.nn.functional import smooth_l1_loss

    def train(model, data, context):
        optimizer = torch.optim.SGD(context.parameters(), lr=0.05)
        for x, y in data.batches(16):
            optimizer.zero_grad()
            smooth_l1_loss(model(x), y).backward()
            optimizer.step()

    def evaluate(model, data):
        return (model(data.x) - data.y).abs().mean(dim=1).neg().exp()

    result = run("regression", method="fedavg", train=train, evaluate=evaluate)
    assert all(0 < row.accuracy <= 1 for row in result.table())
