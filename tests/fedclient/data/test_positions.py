"""Shards of tokens with a label for every position: how they are read, checked and prepared."""

import numpy as np
import pytest

from attune.common.config import TrainSettings
from attune.common.errors import SettingError, ShapeMismatch, ShardError, UndeclaredLabels
from attune.common.plan import ModelSpec, Plan
from attune.fedclient.data.prepare import prepare
from attune.fedclient.data.shard import load_shard
from attune.simulation.partition.datasets import load_dataset

TEXT = np.arange(60).reshape(12, 5) % 7
X, Y = TEXT[:, :-1], TEXT[:, 1:]


def plan_of(per_position: bool, classes: list[int | str]) -> Plan:
    spec = ModelSpec("any", "tokens", (4,), len(classes), 7, per_position=per_position)
    return Plan("f", 0, spec, classes, "fedavg", {}, TrainSettings())


def test_samples_are_counted_as_sequences(write):
    profile = load_shard(write(X, Y, test=(X[:3], Y[:3]))).profile()
    assert profile.per_position and (profile.samples, profile.test_samples) == (12, 3)
    assert (profile.kind, profile.shape, profile.labels, profile.vocabulary) == ("tokens", (4,), list(range(7)), 7)
    assert not load_shard(write(X, Y[:, -1], meta={"kind": "tokens"}, name="each")).profile().per_position


def test_the_hold_out_keeps_labels_with_their_sequences(write):
    shard = load_shard(write(X, Y))
    assert shard.train_y.shape == (9, 4) and shard.test_y.shape == (3, 4)
    following = {tuple(x): tuple(y) for x, y in zip(X, Y, strict=True)}
    for x, y in [*zip(shard.train_x, shard.train_y, strict=True), *zip(shard.test_x, shard.test_y, strict=True)]:
        assert following[tuple(x)] == tuple(y)
    assert load_shard(write(X, Y, test=([], []))).test_y.shape == (0, 4)


def test_labels_become_indices_of_the_plans_classes_where_they_stand(write):
    words = np.array([["b", "a", "a", "c"], ["c", "c", "b", "a"]])
    ready = prepare(load_shard(write(X[:2], words)), plan_of(True, ["c", "a", "z", "b"]))
    assert ready.train_y.tolist() == [[3, 1, 1, 0], [0, 0, 3, 1]] and ready.train_y.shape == ready.train_x.shape


def test_one_position_is_still_a_position(write):
    assert load_shard(write(X[:, :1], Y[:, :1])).per_position


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (X, Y[:, :3], r"has shape \(12, 3\); one label a sample is needed, so shape \(12,\), or one for each.*\(12, 4\)"),
        (X, Y[:, :, None], r"shape \(12, 4, 1\)"),
        (X, Y[:7], "7 labels for 12 samples"),
        (X, Y + 0.5, "48 labels that are no integers, the first is 1.5"),
        (X.astype(float), Y, r"so shape \(12,\)$"),
        (np.zeros((12, 4, 2)), Y, r"so shape \(12,\)$"),
    ],
)
def test_wrong_labels(write, x, y, message):
    with pytest.raises(ShardError, match=message):
        load_shard(write(x, y))


def test_both_parts_are_labelled_alike(write):
    with pytest.raises(ShardError, match=r"\(12, 4\) for training and \(3,\) for testing; give every position a label in both"):
        load_shard(write(X, Y, test=(X[:3], Y[:3, 0])))


def test_undeclared_labels_are_counted_by_position(write):
    with pytest.raises(UndeclaredLabels, match="holds 6 positions with labels outside the declared classes: 6"):
        load_shard(write(X, Y, test=(X[:1], Y[:1]), meta={"classes": [0, 1, 2, 3, 4, 5]}))


def test_a_shard_that_is_labelled_otherwise_than_the_plan_says_is_refused(write):
    every, each = load_shard(write(X, Y)), load_shard(write(X, Y[:, -1], meta={"kind": "tokens"}, name="each"))
    with pytest.raises(ShapeMismatch, match="each has a label for every sample, but the model gives one for every position"):
        prepare(each, plan_of(True, list(range(7))))
    with pytest.raises(ShapeMismatch, match="mine has a label for every position, but the model gives one for every sample"):
        prepare(every, plan_of(False, list(range(7))))


def test_such_samples_have_no_class_to_be_cut_by(write):
    with pytest.raises(SettingError, match="a label for every position"):
        load_dataset(str(write(X, Y)))
