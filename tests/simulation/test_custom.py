"""A task of one's own: y of any shape, a user's loss and score; what needs a likelihood is refused without one."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import attune
from attune.common.errors import SettingError, ShardError
from attune.common.plugins import own_measure
from attune.fedclient.data.shard import load_shard
from attune.fedclient.model import artifact
from attune.fedclient.model.artifact import Model
from attune.fedclient.work.task_measures import CustomMeasure

PLAIN, LIKELY = (f"attune.tests.simulation.{name}:points" for name in ("own_task", "own_likely_task"))
QUICK = {"train.lr": 0.1, "train.batch_size": 8, "train.local_epochs": 4}


def site(seed: int, images: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Return images with two bright pixels, and their places from 0 to 1, (N, 2, 2): the left one first."""
    draw = np.random.default_rng(seed)
    place = np.sort(draw.integers(0, 6, (images, 2, 2)), axis=1)
    x = 0.1 * draw.random((images, 6, 6, 1), dtype=np.float32)
    x[np.arange(images)[:, None], place[..., 0], place[..., 1], 0] = 1
    return x, place / 5


def run(method: str = "fedavg", model: str = PLAIN, settings: Any = None, rounds: int = 2, **more: Any) -> Any:
    shards = {f"site{seed}": site(seed) for seed in range(3)}
    settings = QUICK | (settings or {})
    return attune.simulate(shards, method, model, rounds=rounds, task="custom", settings=settings, progress=False, **more)


def test_a_task_of_ones_own_is_learned_scored_and_compared_with_the_network_alone():
    result = run(baseline="alone")
    assert result.status["metric"] == "score"
    for client in result.status["clients"]:
        assert client["accuracy"] > 0.6 and client["accuracy_constant"] is client["accuracy_alone"] is None
        assert client["accuracy_local"] is not None and client["verdict"] in ("better", "unclear", "worse")
        assert client["interval"] is None and client["test_samples"] == 10
    assert not result.model("site0").info.weights, "no likelihood, no blend"


def test_with_a_likelihood_models_are_blended():
    result = run(model=LIKELY, baseline="local")
    weights = result.model("site0").info.weights
    assert weights.keys() == {"common", "local"} and sum(weights.values()) == pytest.approx(1)
    assert result.status["clients"][0]["likelihood_kept"] is None and result.model("site0").info.train.validation == 0.1


def test_a_finished_model_predicts_answers_of_any_shape(tmp_path):
    x, y = site(0)
    model = run().model("site0")
    folder = artifact.save(tmp_path / "model", model.info, {name: each.tensors for name, each in model.members.items()})
    again = Model.load(folder, allow_models=[PLAIN])
    said = np.array(again.predict(x))
    assert said.shape == y.shape and said.min() >= 0 and said.max() <= 1
    np.savez(tmp_path / "train.npz", x=x[:4], y=y[:4])
    np.savez(tmp_path / "test.npz", x=x, y=y)
    (tmp_path / "meta.json").write_text('{"task": "custom"}')
    by_hand = 1 - np.linalg.norm(said - y, axis=2).mean()
    assert again.evaluate(load_shard(tmp_path)) == (pytest.approx(by_hand, abs=1e-6), 40)
    with pytest.raises(SettingError, match="code of its own"):
        Model.load(folder)


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("fedmcsa", {"method.dial": True}, '"custom" cannot be combined with method.dial, which goes by how likely'),
        ("fedavg", {"train.score_after": [1]}, '"custom" cannot be combined with train.score_after.*give the class Measure'),
        ("fedavg", {"round.patience": 2}, '"custom" cannot be combined with round.patience'),
        ("auto", {"auto.candidates": ["fedavg", "fedper"]}, "in place of --method auto name a method"),
        (
            "fedavg",
            {"privacy.unit": "example", "privacy.noise": 1.0},
            '"custom" cannot be combined with privacy.unit = "example"',
        ),
        ("fedrod", {}, "method fedrod cannot be used for custom"),
    ],
)
def test_what_needs_a_likelihood_or_classes_is_refused_by_name(method, settings, message):
    with pytest.raises(SettingError, match=message):
        run(method, settings=settings, rounds=3)


def test_models_that_bring_no_measure_are_refused():
    with pytest.raises(
        SettingError, match=r'the task "custom" needs a model of your own, module:factory, beside a class Measure'
    ):
        run(model="convnet")
    with pytest.raises(SettingError, match="own_model has no class Measure for the task custom"):
        own_measure("attune.tests.e2e.own_model:tiny")


def test_a_measure_must_have_functions_that_give_a_number_for_each_sample(monkeypatch):
    lacking = ModuleType("attune_lacking")
    lacking.Measure = type("Measure", (), {"loss": lambda self, scores, y: scores.mean()})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "attune_lacking", lacking)
    with pytest.raises(SettingError, match=r"attune_lacking:Measure has no score \(docs"):
        own_measure("attune_lacking:net")
    y = torch.zeros(3, 2)
    measure = CustomMeasure(
        SimpleNamespace(loss=lambda scores, y: scores.mean(), score=lambda answers, y: torch.full((3,), 1.5))
    )
    with pytest.raises(SettingError, match=r"Measure.loss must give a tensor with a number for each of 3 samples, not \(\)"):
        measure.loss(y, y)
    with pytest.raises(SettingError, match=r"Measure.score gave 1\.5: a score is 1 at most"):
        measure.right(y, y)


def test_numbers_by_hand():
    """Expect losses 1 and 4, their mean, and a weighted one; a score that is no number is the lowest."""
    measure = CustomMeasure(
        SimpleNamespace(
            loss=lambda scores, y: (scores - y).square().sum(dim=1),
            score=lambda answers, y: 1 - (answers - y).abs().sum(dim=1),
            likelihood=lambda scores, y: torch.exp(-(scores - y).abs().sum(dim=1)),
        )
    )
    scores, y = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.zeros(2, 2)
    assert float(measure.loss(scores, y)) == 2.5
    assert float(measure.loss(scores, y, torch.tensor([0.75, 0.25]))) == 1.75
    assert measure.right(scores, y).tolist() == [0.0, -1.0]
    assert measure.right(torch.full((2, 2), torch.nan), y).tolist() == [-1.0, -1.0]
    assert measure.evidence(scores.unsqueeze(0), y).tolist() == [pytest.approx([np.exp(-1), np.exp(-2)])]


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (np.array(["a"] * 8), "the task custom needs numbers"),
        (np.zeros((7, 2, 2)), "7 rows for 8 samples"),
        (np.full((8, 2), np.nan), "16 values that are not finite"),
    ],
)
def test_wrong_y(tmp_path, y, message):
    np.savez(tmp_path / "train.npz", x=np.random.default_rng(0).random((8, 4, 4)), y=y)
    (tmp_path / "meta.json").write_text('{"task": "custom", "kind": "images"}')
    with pytest.raises(ShardError, match=message):
        load_shard(tmp_path)
