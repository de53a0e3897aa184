"""Samples of other sizes and channels: resized, cut, filled up and mixed as the plan says, by hand and by an oracle."""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attune.common.errors import NonFiniteFeatures, SettingError, ShapeMismatch, ShardError
from attune.common.plan import DataSettings, ModelSpec, Scale, channel_weights, fitting_words
from attune.fedclient.data.kinds import fit_floats, nearest, resizing
from attune.fedclient.data.prepare import prepare, prepare_features
from attune.fedclient.data.shard import load_shard

RGB = ["red", "green", "blue"]


def spec(kind, shape, channels, **more):
    return ModelSpec("any", kind, shape, 2, channels=channels, **more)


def plan_of(plan_for, kind, shape, channels, **more):
    return msgspec.structs.replace(plan_for(kind, shape, [0, 1]), model=spec(kind, shape, channels, **more))


def test_two_pixels_become_four_and_four_become_two_by_hand():
    """Centres of 4 new pixels lie at 0.25, 0.75, 1.25, 1.75 of two old ones at 0.5 and 1.5.

    Of two new pixels over four old ones, the first has its centre at 1 and reaches 2: 1 - 0.5/2, twice, then 1 - 1.5/2.
    """
    assert resizing(2, 4).tolist() == [[1, 0], [0.75, 0.25], [0.25, 0.75], [0, 1]]
    assert resizing(4, 2) * 7 == pytest.approx(np.array([[3, 3, 1, 0], [0, 1, 3, 3]]))
    x = np.array([[[[0.0], [4.0]], [[8.0], [12.0]]]])
    rows = [[0, 1, 3, 4], [2, 3, 5, 6], [6, 7, 9, 10], [8, 9, 11, 12]]
    assert fit_floats(x, spec("images", (4, 4, 1), []), [[1.0]])[0, :, :, 0].tolist() == rows


@settings(max_examples=40, deadline=None)
@given(st.tuples(*[st.integers(1, 40)] * 4), st.integers(0, 9))
def test_any_size_becomes_any_other_as_torch_resizes_it(sizes, seed):
    height, width, new_height, new_width = sizes
    x = np.random.default_rng(seed).random((2, height, width, 3))
    ready = prepare_features(x, spec("images", (new_height, new_width, 3), RGB), None)
    assert ready.shape == (2, 3, new_height, new_width) and ready.min() >= 0 and ready.max() <= 1 + 1e-6
    by_torch = torch.nn.functional.interpolate(
        torch.from_numpy(x).movedim(-1, 1), size=(new_height, new_width), mode="bilinear", antialias=True
    )
    assert ready.numpy() == pytest.approx(by_torch.numpy(), abs=1e-5)


def test_grey_and_colours_stand_for_each_other_and_other_channels_go_by_name():
    assert channel_weights(spec("images", (2, 2, 3), RGB), (9, 9, 1), ()) == [[1.0]] * 3
    assert channel_weights(spec("images", (2, 2, 1), ["grey"]), (9, 9, 3), ()) == [[0.299, 0.587, 0.114]]
    assert channel_weights(spec("images", (2, 2, 3), RGB), (2, 2, 4), ())[2] == [0.0, 0.0, 1.0, 0.0]
    named = spec("images", (2, 2, 3), ["t1", "t2", "flair"])
    assert channel_weights(named, (2, 2, 2), ("flair", "t1")) == [[0, 1], [0, 0], [1, 0]]
    assert channel_weights(named, (2, 2, 3), ()) == np.eye(3).tolist(), "as many without names are the plan's"
    assert channel_weights(named, (2, 2, 2), ()) == channel_weights(named, (2, 2, 1), ("pd",)) == []
    half, one = np.full((1, 1, 1, 2), 0.5), spec("images", (1, 1, 3), named.channels)
    assert prepare_features(half, one, None, names=("flair", "t1")).flatten().tolist() == [0.5, 0.0, 0.5]


def test_the_last_steps_of_a_series_stay_and_what_is_missing_is_the_mean(write, plan_for):
    """Axis z has 1, 3, 5, ..., axis x is 10 everywhere; the plan knows x, y and z of 3 steps."""
    z = 1.0 + 2 * np.arange(8).reshape(4, 2)
    x = np.stack([z, np.full_like(z, 10), np.zeros_like(z)], axis=-1)
    meta = {"columns": ["z", "x", "gyro"]}
    shard = load_shard(write(x, [0, 1, 0, 1], test=(x[:1], [0]), meta=meta))
    ready = prepare(shard, plan := plan_of(plan_for, "series", (3, 3), ["x", "y", "z"]))
    assert ready.standardiser.mean.tolist() == [10, 0, 8] and ready.standardiser.std[2] == pytest.approx(21**0.5)
    assert ready.test_x[0].tolist() == [[0, 0, 0], [0, 0, pytest.approx(-7 / 21**0.5)], [0, 0, pytest.approx(-5 / 21**0.5)]]
    words = fitting_words(plan.model, (2, 3), shard.column_names)
    assert words.startswith("series of 2 steps are filled up in front to 3; channels missing here, which stay at the mean: y")
    assert words.endswith("channels that the plan does not know, and are left out: gyro")
    cut = prepare_features(x[:, ::-1], spec("series", (1, 1), ["z"]), None, names=("z", "x", "gyro"))
    assert cut.flatten().tolist() == [1, 5, 9, 13], "the last step"
    x[1, 0, 1] = np.nan
    with pytest.raises(NonFiniteFeatures, match="1 NaN or infinite values in 1 of 4 samples"):
        prepare_features(x, plan.model, ready.standardiser, names=("z", "x", "gyro"))
    x[1, 0, 1] = 10
    common = msgspec.structs.replace(plan, scale=Scale([0.0, 0.0, 1.0], [1.0, 1.0, 2.0]))
    folder = write(x, [0, 1, 0, 1], test=(x[:1], [0]), meta=meta | {"standardise": "federation"})
    assert prepare(load_shard(folder), common).test_x[0].tolist() == [[0, 0, 0], [10, 0, 0], [10, 0, 1]]


def test_labels_of_pixels_are_the_nearest_ones(write, plan_for):
    """The centres of three new rows lie at 1, 3 and 5 of six old ones, those of two new columns at 1.5 and 4.5."""
    y = np.arange(36).reshape(1, 6, 6)
    assert nearest(y, (3, 2)).tolist() == [[[7, 10], [19, 22], [31, 34]]]
    area = np.repeat([[[1] * 4] * 2 + [[0] * 4] * 2], 8, axis=0)
    x = area[..., None].astype(np.float32) + np.arange(8, dtype=np.float32).reshape(-1, 1, 1, 1)
    shard = load_shard(write(x, area, test=(x, area)))
    ready = prepare(shard, plan_of(plan_for, "images", (2, 2, 1), ["grey"], per_position=True))
    assert ready.test_y[0].tolist() == [[1, 1], [0, 0]] and ready.test_x.shape == (8, 1, 2, 2)


def test_the_plans_form_keeps_its_bits_and_others_need_the_setting(write, plan_for):
    x = np.random.default_rng(0).integers(0, 256, (6, 5, 4, 3), np.uint8)
    plain = ModelSpec("any", "images", (5, 4, 3), 2)
    assert torch.equal(prepare_features(x, plain, None), prepare_features(x, spec("images", (5, 4, 3), RGB), None))
    with pytest.raises(ShapeMismatch, match="bring the samples to that shape"):
        prepare_features(x[:, 1:], plain, None)
    for wrong in ({}, {"shape": [6]}, {"shape": [6, 3], "columns": ["a"]}):
        with pytest.raises(SettingError, match=r"data\.fit needs data\.shape"):
            DataSettings(fit=True, **wrong)
    with pytest.raises(ShapeMismatch, match="holds images of 5 x 4 x 2"):
        prepare_features(x[..., :2], spec("images", (5, 4, 3), RGB), None)
    with pytest.raises(ShardError, match=r"6 images of 99999 x 9999 x 3 .* are over 8 GiB"):
        prepare_features(x, spec("images", (99999, 9999, 3), RGB), None)
    assert fitting_words(plain, (9, 9, 3), ()) == fitting_words(spec("images", (5, 4, 3), RGB), (5, 4, 3), ()) == ""
