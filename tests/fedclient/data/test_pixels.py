"""Shards of images with a label for every pixel: how they are read, checked, held out, prepared and cut."""

import numpy as np
import pytest

from attune.common.config import TrainSettings
from attune.common.errors import SettingError, ShapeMismatch, ShardError
from attune.common.plan import ModelSpec, Plan, Profile
from attune.fedclient.data.holdout import strata
from attune.fedclient.data.prepare import prepare
from attune.fedclient.data.shard import load_shard
from attune.fedserver.core.ballot import check_training, score_of
from attune.fedserver.core.data_form import check_fits, check_possible
from attune.simulation.partition.datasets import load_dataset
from attune.simulation.partition.split import partition, write_shards

N, H, W = 12, 5, 6
X = np.random.default_rng(0).random((N, H, W, 2)).astype(np.float32)
Y = np.zeros((N, H, W), np.uint8)
Y[:6, 1:3, 1:3] = 255  # half of the images show something
SPEC = ModelSpec("unet", "images", (H, W, 2), 2, per_position=True)
PLAN = Plan("f", 0, SPEC, [0, 255], "fedavg", {}, TrainSettings())
PROFILE = Profile("images", (H, W, 2), [0, 255], 9, 3, per_position=True)


def test_masks_are_read_beside_their_images(write):
    shard = load_shard(write(X, Y))
    assert shard.profile() == PROFILE and shard.described.startswith("images of shape 5 x 6 x 2, a label at every pixel")
    area = {x.tobytes(): y.tobytes() for x, y in zip(X, Y.astype(np.int64), strict=True)}
    assert all(area[x.tobytes()] == y.tobytes() for x, y in zip(shard.train_x, shard.train_y, strict=True))
    channels_first = load_shard(write(X.transpose(0, 3, 1, 2)[:, :1], Y, name="first"))
    assert channels_first.train_x.shape == (9, H, W, 1) and channels_first.per_position


def test_masks_become_indices_where_they_stand(write):
    ready = prepare(load_shard(write(X, Y, test=(X[:2], Y[:2]))), PLAN)
    assert ready.train_x.shape == (N, 2, H, W) and np.array_equal(ready.train_y, Y // 255) and ready.test_y.shape == (2, H, W)


def test_images_with_something_in_them_are_held_out_in_proportion():
    assert strata(Y, "classes").tolist() == [1] * 6 + [0] * 6
    assert strata(np.where(Y, "tumour", "background"), "classes").tolist() == [1] * 6 + [0] * 6


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (Y.transpose(0, 2, 1), r"has shape \(12, 6, 5\); .* or one for each pixel, so shape \(12, 5, 6\)"),
        (Y[..., None], r"shape \(12, 5, 6, 1\)"),
        (Y[:7], "7 labels for 12 samples"),
        (Y + 0.5, "360 labels that are no integers"),
    ],
)
def test_wrong_masks(write, y, message):
    with pytest.raises(ShardError, match=message):
        load_shard(write(X, y))


def test_pixels_and_images_are_told_apart(write):
    with pytest.raises(ShapeMismatch, match=r"a label for every sample, but the model gives one .*of images .*\(N, H, W\)"):
        prepare(load_shard(write(X, Y[:, 0, 0])), PLAN)
    check_possible(PROFILE, "kiel")
    with pytest.raises(ShapeMismatch, match="a label for every image; this federation expects one for every pixel"):
        check_fits(Profile("images", (H, W, 2), [0, 255], 9, 3), PLAN, "kiel")


def test_the_score_is_dice_unless_another_one_is_asked_for():
    def score(name):
        return score_of(TrainSettings(score=name), [0, 255], [PROFILE])

    assert score_of(TrainSettings(), [0, 255], [PROFILE])["score"] == "dice" and score("auto")["score"] == "dice"
    assert (score("iou"), score("dice"), score("accuracy")) == ({"score": "iou"}, {"score": "dice"}, {})
    with pytest.raises(SettingError, match="for two classes with one label a sample"):
        score("auroc")
    with pytest.raises(SettingError, match=r'"iou" is for images with a label for every pixel'):
        score_of(TrainSettings(score="iou"), [0, 1], [Profile("images", (4, 4, 1), [0, 1], 9, 3)])
    with pytest.raises(SettingError, match="nothing to tell apart"):
        score_of(TrainSettings(), [0], [PROFILE])


def test_settings_of_training_that_do_not_fit():
    check_training(TrainSettings(loss="dice", augment=("noise",)), PROFILE)
    with pytest.raises(SettingError, match="erase, flip would move or hide pixels and not their labels"):
        check_training(TrainSettings(augment=("flip", "noise", "erase")), PROFILE)
    with pytest.raises(SettingError, match=r'train.loss = "dice" is for images with a label for every pixel'):
        check_training(TrainSettings(loss="dice"), Profile("tokens", (4,), [0, 1], 9, 3, 7, per_position=True))


def test_a_data_set_of_masks_is_cut_by_the_class_with_the_largest_area(tmp_path):
    y = np.repeat(Y, 4, axis=0)
    y[40:, 0, 0] = 7  # the last 8 of the images without a 255
    np.savez(tmp_path / "all.npz", x=np.repeat(X, 4, axis=0), y=y, site=np.arange(48) % 3)
    data = load_dataset(str(tmp_path / "all.npz"))
    assert np.bincount(data.class_indices()).tolist() == [16, 8, 24]
    folders = write_shards(tmp_path / "shards", partition(data, "iid", 2))
    assert [load_shard(folder).train_y.shape[1:] for folder in folders] == [(H, W)] * 2
    parts = partition(data, "natural", by="site")
    assert len(parts.names) == 3 and parts.counts("train").sum(axis=1).tolist() == [len(train) for train in parts.train]
