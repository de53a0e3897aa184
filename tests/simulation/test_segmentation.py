"""Whole federations about the pixels of images: methods, scores, verdicts, the Dice loss, finished models, and refusals."""

from typing import Any

import numpy as np
import pytest
import torch

import attune
from attune.common.errors import AttuneError, SettingError
from attune.fedclient.data.shard import load_shard
from attune.fedclient.model import artifact, portable
from attune.fedclient.model.artifact import Model
from benchmarks.shapes import site

SIDE = 8
QUICK = {"train.lr": 0.1, "train.batch_size": 8, "train.local_epochs": 8, "model.width": 4, "model.depth": 1}


def run(method: str, rounds: int = 3, settings: Any = None, **more: Any) -> Any:
    shards = {f"site{number}": site(number, 40, side=SIDE) for number in range(3)}
    return attune.simulate(shards, method, rounds=rounds, settings=QUICK | (settings or {}), progress=False, **more)


def dice_of(said: np.ndarray, true: np.ndarray) -> float:
    """Return the mean Dice of images as in Areas, computed in another way."""
    scores = []
    for one, other in zip(said, true, strict=True):
        counts = [(int(((one == k) & (other == k)).sum()), int((one == k).sum() + (other == k).sum())) for k in (1, 2)]
        scores.append(np.mean([2 * both / areas for both, areas in counts if areas] or [1.0]))
    return float(np.mean(scores))


@pytest.mark.parametrize("method", ["fedavg+ft", "fedper", "fedbn", "fedmcsa"])
def test_personal_methods_learn_pixels_and_are_compared_with_the_network_alone(method):
    result = run(method, baseline="alone")
    assert result.status["metric"] == "Dice" and result.status["method"] == method
    clients = result.status["clients"]
    assert sum(one["accuracy"] - one["accuracy_constant"] for one in clients) > 0
    for client in clients:
        assert client["accuracy"] > client["accuracy_constant"] / 2 and client["accuracy_alone"] is None
        assert client["interval"] is None and client["accuracy_local"] is not None
        assert client["verdict"] in ("better", "unclear", "worse")
        assert client["better_than_local"] + client["worse_than_local"] <= client["test_samples"] == 10


def test_stacked_devices_agree_to_rounding():
    few: dict[str, Any] = {"rounds": 1, "settings": {"train.local_epochs": 1, "train.loss": "dice"}, "baseline": "local"}
    plain, stacked = (run("fedper", executor=executor, **few) for executor in ("sequential", "stacked"))
    for name in ("site0", "site1"):
        one, other = (result.model(name).tensors for result in (plain, stacked))
        assert all(torch.allclose(one[key], other[key], rtol=1e-3, atol=1e-5) for key in one)


def test_a_finished_model_predicts_masks_and_survives_saving_and_exporting(tmp_path):
    result = run("fedbn", baseline="local")
    x, y = site(0, 40, side=SIDE)
    model = result.model("site0")
    folder = artifact.save(tmp_path / "model", model.info, {name: each.tensors for name, each in model.members.items()})
    again = Model.load(folder)
    masks = np.array(again.predict(x))
    assert masks.shape == y.shape and set(np.unique(masks)) <= {0, 1, 2}
    assert again.probabilities(x[:3]).sum(axis=-1) == pytest.approx(np.ones((3, SIDE, SIDE)), abs=1e-5)
    np.savez(tmp_path / "train.npz", x=x[:4], y=y[:4])
    np.savez(tmp_path / "test.npz", x=x, y=y)
    assert again.evaluate(load_shard(tmp_path)) == (pytest.approx(dice_of(masks, y)), 40)
    assert portable.export(again, tmp_path / "out.pt2") <= portable.TOLERANCE


def test_the_dice_loss_and_the_score_change_what_they_should():
    plain, dice = run("fedavg", 1), run("fedavg", 1, {"train.loss": "dice", "train.score": "iou"})
    one, other = (result.model("site0").tensors for result in (plain, dice))
    assert any(not torch.equal(one[name], other[name]) for name in one), "trained on another loss"
    assert dice.status["metric"] == "IoU"
    accuracy = run("fedavg", 1, {"train.score": "accuracy"})
    assert accuracy.status["metric"] == "accuracy" and accuracy.status["clients"][0]["accuracy"] > 0.5
    again = accuracy.model("site0").tensors
    assert all(torch.equal(one[name], again[name]) for name in one), "a score changes no training"


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("fedtp", {}, "no built-in model for images with a label for every pixel has tensors of the roles qkv"),
        ("fedtp", {"model.name": "unet"}, "model unet has no tensors of the roles .*which method fedtp needs"),
        ("fedavg", {"model.name": "vit"}, "vit does not take images with a label for every pixel; models that do: unet"),
        ("fedavg", {"train.augment": ["crop"]}, "crop would move or hide pixels and not their labels"),
        ("analytic", {}, "closed-form does not take images with a label for every pixel"),
        ("fedavg", {"privacy.unit": "example", "privacy.noise": 1.0, "model.norm": "batch"}, "statistics over a batch"),
    ],
)
def test_what_does_not_fit_pixels_is_refused_by_name(method, settings, message):
    settings = {key: value for key, value in QUICK.items() if method == "fedavg" and "model.name" not in settings} | settings
    shards = {f"site{number}": site(number, 8, side=SIDE) for number in range(2)}
    with pytest.raises(SettingError, match=message):
        attune.simulate(shards, method, rounds=1, settings=settings, progress=False)


def test_labels_of_pixels_alone_are_images_of_one_kind_for_a_federation():
    x, y = site(0, 24, side=SIDE)
    with pytest.raises(AttuneError, match="label for every"):
        attune.simulate({"a": (x, y), "b": (x, y), "c": (x, y[:, 0, 0])}, "fedavg", rounds=1, progress=False)
