"""Normalisation and rising noise, against numbers by hand and by numpy in one piece."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from attune.common.errors import SettingError
from attune.fedclient.data.shard import load_shard
from attune.simulation.partition import features
from attune.simulation.partition.samples import Dataset
from attune.simulation.partition.split import partition, write_shards


@pytest.fixture
def images() -> Dataset:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (90, 4, 5, 3)).astype(np.uint8)
    x[:, 0, 0, 0] = 9  # a pixel that never changes
    y = np.arange(90) % 3
    return Dataset("made", "images", x[:60], y[:60], x[60:], y[60:], [0, 1, 2], 0)


def test_channel_and_pixel(images, monkeypatch):
    monkeypatch.setattr(features, "_CHUNK", 7)
    channel, pixel = features.normaliser(images, "channel"), features.normaliser(images, "pixel")
    train, both = images.train_x / 255.0, np.concatenate([images.train_x, images.test_x]) / 255.0
    assert np.allclose(channel.mean, train.mean(axis=(0, 1, 2))) and np.allclose(channel.std, train.std(axis=(0, 1, 2)))
    assert np.allclose(pixel.mean, both.mean(axis=0)) and pixel.std[0, 0, 0] == 1.0
    assert np.allclose(pixel.std[1:], both.std(axis=0)[1:])
    made = pixel.apply(images.train_x)
    assert made.dtype == np.float32 and not made[:, 0, 0, 0].any()
    assert np.allclose(made, (train - pixel.mean) / pixel.std, atol=1e-5)


def test_the_published_constants(images):
    made = features.normaliser(images, "cifar100").apply(np.full((1, 1, 1, 3), 255, np.uint8))
    assert np.allclose(made[0, 0, 0], [(1 - 0.5071) / 0.2673, (1 - 0.4865) / 0.2564, (1 - 0.4409) / 0.2762])
    with pytest.raises(SettingError, match="3 channels"):
        features.normaliser(dataclasses.replace(images, train_x=images.train_x[..., :1]), "cifar10")


def test_noise_rises_with_the_client(images, tmp_path: Path):
    assert features.noise_levels(5, 20.0).tolist() == [0, 5, 10, 15, 20] and features.noise_levels(1, 20.0).tolist() == [0]
    clean, noisy = (partition(images, "iid", 5, seed=2, normalise="channel", noise=noise) for noise in (0.0, 20.0))
    for client, sigma in enumerate([0.0, 5.0, 10.0, 15.0, 20.0]):
        assert np.array_equal(clean.train[client], noisy.train[client])
        for part in ("train", "test"):
            added = noisy.arrays(client, part)[0] - clean.arrays(client, part)[0]
            assert added.std() == pytest.approx(sigma, rel=0.1) and abs(added.mean()) <= 0.2 * sigma
    assert not np.array_equal(noisy.arrays(4, "train")[0][:6], noisy.arrays(4, "test")[0][:6])
    folders = write_shards(tmp_path / "out", noisy)
    assert load_shard(folders[3]).train_x.dtype == np.float32 and load_shard(folders[3]).kind == "images"
    record = (tmp_path / "out" / "partition.json").read_text()
    assert '"noise": 20.0' in record and '"sigma": 15.0' in record and '"normalise": "channel"' in record


def test_no_sample_that_is_tested_tells_its_value_to_the_normalisation(images):
    """A scheme may test samples of the data set's training part."""
    site = np.arange(60) % 3
    whole = dataclasses.replace(images, test_x=images.test_x[:0], test_y=images.test_y[:0], more={"client": site})
    whole = dataclasses.replace(whole, train_x=images.train_x[:60], train_y=images.train_y[:60])
    parts = partition(whole, "natural", normalise="channel")
    trained = whole.train_x[np.sort(np.concatenate(parts.train))] / 255.0
    assert len(trained) < 60 and np.allclose(parts.normaliser.mean, trained.mean(axis=(0, 1, 2)))


def test_what_is_not_normalised_stays_as_it_was(images):
    parts = partition(images, "iid", 2)
    assert parts.normaliser is None and parts.arrays(0, "train")[0].dtype == np.uint8
    assert partition(images, "iid", 2, noise=0.5).normaliser is not None
