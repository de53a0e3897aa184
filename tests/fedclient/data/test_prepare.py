"""Shards as tensors: scaling, axes, class indices, and the refusal of data that do not fit the plan."""

import json

import msgspec
import numpy as np
import pytest
import torch

from attune.common.config import TrainSettings
from attune.common.errors import NonFiniteFeatures, ShapeMismatch, ShardError, UndeclaredLabels
from attune.common.plan import ModelSpec
from attune.fedclient.data.prepare import prepare, prepare_features
from attune.fedclient.data.shard import load_shard
from attune.fedclient.data.standardiser import Standardiser


def test_images_become_channels_first_fractions(write, plan_for):
    x = np.zeros((2, 2, 3, 2), np.uint8)
    x[1, 0, 2, 1] = 51
    ready = prepare(load_shard(write(x, ["b", "a"])), plan_for("images", (2, 3, 2), ["a", "b", "c"]))
    assert ready.train_x.shape == (2, 2, 2, 3) and ready.train_x.dtype == torch.float32 and ready.train_x.is_contiguous()
    assert ready.train_x[1, 1, 0, 2].item() == pytest.approx(0.2) and ready.train_x.sum().item() == pytest.approx(0.2)
    assert ready.train_y.tolist() == [1, 0] and ready.train_y.dtype == torch.int64 and ready.standardiser is None


def test_float_images_stay_as_they_are(write, plan_for):
    x = np.linspace(-4, 4, 2 * 2 * 3 * 1, dtype=np.float32).reshape(2, 2, 3, 1)
    ready = prepare(load_shard(write(x, [0, 1])), plan_for("images", (2, 3, 1), [0, 1]))
    assert np.array_equal(ready.train_x[:, 0].numpy(), x[..., 0])


def test_tokens_become_int64(write, plan_for):
    x = np.array([[1, 2], [3, 0]], dtype=">u2")
    ready = prepare(load_shard(write(x, [0, 1], meta={"kind": "tokens"})), plan_for("tokens", (2,), [0, 1], vocabulary=9))
    assert ready.train_x.tolist() == [[1, 2], [3, 0]] and ready.train_x.dtype == torch.int64


def test_tabular_is_standardised_with_the_training_part_only(write, plan_for):
    train = np.array([[1.0, 7.0, 1e200], [3.0, 7.0, -1e200]])
    test = np.array([[5.0, 8.0, 0.0]])
    ready = prepare(load_shard(write(train, [0, 1], test=(test, [1]))), plan_for("tabular", (3,), [0, 1]))
    assert ready.train_x.tolist() == [[-1.0, 0.0, 1.0], [1.0, 0.0, -1.0]]
    assert ready.test_x.tolist() == [[3.0, 1.0, 0.0]]  # mean 2, deviation 1; a constant column is divided by 1
    saved = Standardiser.from_dict(json.loads(json.dumps(ready.standardiser.to_dict())))
    assert np.array_equal(saved.mean, ready.standardiser.mean) and np.array_equal(saved.std, ready.standardiser.std)
    spec = ModelSpec("any", "tabular", (3,), 2)
    assert torch.equal(prepare_features(test, spec, saved), ready.test_x)


def test_samples_of_a_group_are_one_in_the_comparison_and_where_models_are_weighed(write, plan_for):
    x, groups = np.arange(48, dtype=np.float32).reshape(24, 2), np.repeat(["a", "b", "c", "d"], 6)
    folder = write(x, [0, 1] * 12, test=(x[:3], [0, 1, 0]), meta={"groups": "run"})
    np.savez(folder / "train.npz", x=x, y=[0, 1] * 12, run=groups)
    np.savez(folder / "test.npz", x=x[:3], y=[0, 1, 0], run=["z", "y", "z"])
    ready = prepare(load_shard(folder), plan_for("tabular", (2,), [0, 1]))
    assert ready.test_groups.tolist() == [1, 0, 1]
    assert len(ready.validation_x) == 6 and ready.validation_weight.tolist() == [pytest.approx(1 / 6)] * 6, "one group of six"
    plain = prepare(load_shard(write(x, [0, 1] * 12, meta={})), plan_for("tabular", (2,), [0, 1]))
    assert plain.test_groups is None and plain.validation_weight is None


def test_a_dial_gets_samples_of_its_own_where_devices_score_what_they_would_keep(write, plan_for):
    x = np.arange(60, dtype=np.float32).reshape(60, 1)
    shard = load_shard(write(x, [0, 1] * 30, meta={"standardise": False}))
    plain = plan_for("tabular", (1,), [0, 1])
    scored = msgspec.structs.replace(plain, train=TrainSettings(score_after=(1,)), method_options={"dial": True})
    ready, usual = prepare(shard, scored), prepare(shard, plain)
    assert ready.validation_x.equal(usual.validation_x), "what scores is the same for every method"
    parts = [set(part.flatten().tolist()) for part in (ready.train_x, ready.validation_x, ready.dial.x)]
    assert [len(part) for part in parts] == [37, 4, 4] and len(set.union(*parts)) == 45
    assert ready.dial_samples is ready.dial and usual.dial_samples.x.equal(usual.validation_x)
    for other in (msgspec.structs.replace(scored, method_options={}), msgspec.structs.replace(scored, train=TrainSettings())):
        assert prepare(shard, other).dial is None


def test_features_stay_as_they_are_where_meta_says_so(write, plan_for):
    train, test = np.array([[1.0, 7.0], [3.0, 9.0]]), np.array([[5.0, 8.0]])
    shard = load_shard(write(train, [0, 1], test=(test, [1]), meta={"standardise": False}))
    ready = prepare(shard, plan_for("tabular", (2,), [0, 1]))
    assert (ready.train_x.tolist(), ready.test_x.tolist(), ready.standardiser) == (train.tolist(), test.tolist(), None)


def test_series_are_standardised_by_channel(write, samples, plan_for):
    x, y = samples("series")
    x[72:] += 100.0  # held-out samples do not count in the statistics
    ready = prepare(load_shard(write(x, y, test=(x[:3], y[:3]))), plan_for("series", (7, 3), [0, 1]))
    trained = x[:72].astype(np.float64)
    expected = (x.astype(np.float64) - trained.mean((0, 1))) / trained.std((0, 1))
    assert (len(ready.train_x), len(ready.validation_x)) == (72, 8), "a tenth of 80 is held out, and scaled alike"
    assert np.allclose(np.concatenate([ready.train_x.numpy(), ready.validation_x.numpy()]), expected, atol=1e-3)


def test_a_constant_that_is_no_binary_fraction_stays_constant():
    fitted = Standardiser.fit(np.full((1000, 1), 0.1))
    assert fitted.std.tolist() == [1.0] and abs(fitted.apply(np.full((1, 1), 0.1))[0, 0]) < 1e-12


def test_empty_test_part(write, plan_for):
    ready = prepare(load_shard(write([[1.0]], [0])), plan_for("tabular", (1,), [0]))
    assert ready.test_x.shape == (0, 1) and ready.test_y.shape == (0,)


def test_refusals(write, samples, plan_for):
    shard = load_shard(write(*samples("images")))
    with pytest.raises(ShapeMismatch, match=r"holds images of 5 x 4 x 1 .* is about tabular of 9 \(features\)"):
        prepare(shard, plan_for("tabular", (9,), [0, 1]))
    with pytest.raises(ShapeMismatch, match=r"images of 5 x 4 x 1 .* takes images of 8 x 8 x 3"):
        prepare(shard, plan_for("images", (8, 8, 3), [0, 1]))
    ones = shard.train_y.sum()
    with pytest.raises(
        UndeclaredLabels, match=rf"training part of shard mine holds {ones} samples .*: 1; the classes are 0, 'x'"
    ):
        prepare(shard, plan_for("images", (5, 4, 1), [0, "x"]))
    tokens = load_shard(write(np.array([[1, 7], [2, 3]]), [0, 1], meta={"vocabulary": 8}))
    with pytest.raises(ShapeMismatch, match="1 tokens outside the federation's vocabulary of 7, the largest is 7"):
        prepare(tokens, plan_for("tokens", (2,), [0, 1], vocabulary=7))


@pytest.mark.parametrize(
    ("x", "spec", "error", "message"),
    [
        (np.zeros((2, 4)), ModelSpec("any", "tabular", (3,), 2), ShapeMismatch, "tabular of 4 .* takes tabular of 3"),
        (np.zeros((2, 3, 1)), ModelSpec("any", "tabular", (3,), 2), ShapeMismatch, "takes tabular of 3"),
        (np.full((2, 3), np.nan), ModelSpec("any", "tabular", (3,), 2), NonFiniteFeatures, "6 NaN"),
        (np.full((2, 3), 1e300), ModelSpec("any", "tabular", (3,), 2), NonFiniteFeatures, "32-bit"),
        (np.full((2, 3), -1), ModelSpec("any", "tokens", (3,), 2, 5), ShardError, "6 negative"),
    ],
)
def test_offline_features_are_checked(x, spec, error, message):
    with pytest.raises(error, match=message):
        prepare_features(x, spec, None)


@pytest.mark.parametrize(
    "saved",
    [
        {},
        {"mean": [1], "std": [0]},
        {"mean": [1], "std": [1, 1]},
        {"mean": ["a"], "std": [1]},
        {"mean": [float("nan")], "std": [1]},
    ],
)
def test_damaged_statistics(saved):
    with pytest.raises(ShardError, match="damaged"):
        Standardiser.from_dict(saved)


def test_statistics_of_another_width():
    with pytest.raises(ShapeMismatch, match="2 features"):
        Standardiser.fit(np.zeros((4, 3))).apply(np.zeros((4, 2)))
