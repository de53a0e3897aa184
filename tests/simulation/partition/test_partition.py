"""Partitions: each scheme against its definition, normalisation and noise by hand, and the files on disk."""

import dataclasses
import errno
import json
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attune.common.errors import DiskFull, SettingError, ShardError
from attune.fedclient.data.shard import load_shard
from attune.simulation.partition import samples
from attune.simulation.partition.datasets import load_dataset
from attune.simulation.partition.samples import Dataset
from attune.simulation.partition.schemes.cut import quotas
from attune.simulation.partition.schemes.shares import deal
from attune.simulation.partition.split import partition, save_picture, table, write_shards

quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
classes_of = st.lists(st.tuples(st.integers(1, 90), st.integers(1, 40)), min_size=1, max_size=8)


def check_everyone(parts) -> None:
    """Check that no sample is used twice or left over, and that both parts of every client have the same classes."""
    split = len(parts.dataset.train_y)
    assert np.array_equal(np.sort(np.concatenate(parts.train)), np.arange(split))
    assert np.array_equal(np.sort(np.concatenate(parts.test)), np.arange(split, len(parts.dataset)))
    assert np.array_equal(parts.counts("train") > 0, parts.counts("test") > 0)


@quick
@given(classes_of, st.integers(1, 9), st.integers(0, 5))
def test_iid(dataset_of, counts, clients, seed):
    data = dataset_of(counts)
    try:
        parts = partition(data, "iid", clients, seed=seed)
    except SettingError:
        assert min(min(pair) for pair in counts) < clients  # refused only if some class has too few samples for all clients
        return
    check_everyone(parts)
    for c, (train, test) in enumerate(counts):
        if min(train, test) >= clients:
            for part, total in (("train", train), ("test", test)):
                each = parts.counts(part)[:, c]
                assert set(each.tolist()) <= {total // clients, -(-total // clients)}


@quick
@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 4), st.integers(0, 5))
def test_pathological(dataset_of, per_client, spare, factor, seed):
    classes = per_client * spare
    clients = spare * factor
    parts = partition(dataset_of([(400, 200)] * classes), "pathological", clients, seed, classes_per_client=per_client)
    check_everyone(parts)
    owned_NC = parts.counts() > 0
    assert (owned_NC.sum(axis=1) == per_client).all() and (owned_NC.sum(axis=0) == factor).all()
    for part, total in (("train", 400), ("test", 200)):
        count_NC = parts.counts(part)
        # shares of draws from U(0.4, 0.6) among m owners lie between 0.4 / (0.4 + 0.6 (m - 1)) and 0.6 / (0.6 + 0.4 (m - 1))
        low, high = total * 0.4 / (0.4 + 0.6 * (factor - 1)), total * 0.6 / (0.6 + 0.4 * (factor - 1))
        assert (count_NC[owned_NC] >= np.floor(low)).all() and (count_NC[owned_NC] <= np.ceil(high)).all()
    assert (np.abs(parts.counts("train") / 2 - parts.counts("test")) <= 1).all()


@quick
@given(st.integers(2, 6), st.sampled_from([0.3, 1.0, 100.0]), st.integers(0, 5))
def test_dirichlet(dataset_of, clients, alpha, seed):
    data = dataset_of([(300, 150)] * 6)
    parts = partition(data, "dirichlet", clients, alpha=alpha, seed=seed)
    check_everyone(parts)
    train_NC, test_NC = parts.counts("train"), parts.counts("test")
    assert train_NC.sum(axis=1).min() >= 10 and test_NC.sum(axis=1).min() >= 10
    assert (np.abs(train_NC / 2 - test_NC) <= 1).all()
    cap = 1800 / clients
    held_N = np.zeros(clients)
    for count_N in train_NC.T:  # class after class: a client at the cap gets no more
        assert not count_N[held_N >= cap].any()
        held_N += count_N


def test_dirichlet_shares_spread_as_alpha_says(dataset_of):
    data = dataset_of([(1000, 500)] * 10)
    spread = [partition(data, "dirichlet", 5, alpha=alpha, seed=1).counts()[:, 0].std() for alpha in (0.1, 1000.0)]
    assert spread[0] > 200 and spread[1] < 20


@quick
@given(st.integers(0, 200), st.lists(st.integers(1, 1000), min_size=1, max_size=12))
def test_quotas_are_exact_shares_rounded(total, weights):
    count = quotas(total, np.array(weights) / sum(weights), np.arange(len(weights)))
    assert count.sum() == total
    for weight, got in zip(weights, count.tolist(), strict=True):
        assert abs(Fraction(total * weight, sum(weights)) - got) < 1


def test_deal_by_hand():
    train, test = deal(100, 10, np.array([0.50, 0.48, 0.02]), np.arange(3))
    assert test.tolist() == [5, 5, 0]  # 2 % of 10 is less than one sample, so the third leaves; 50 : 48 of 100 is 51.02 : 48.98
    assert train.tolist() == [51, 49, 0]


@pytest.mark.parametrize(
    ("scheme", "options", "message"),
    [
        ("pathologic", {}, "did you mean 'pathological'"),
        ("iid", {"clients": 0}, "--clients"),
        ("iid", {"clients": 300}, "too many"),
        ("pathological", {"classes_per_client": 5}, "has 4 classes"),
        ("pathological", {"clients": 3, "classes_per_client": 3}, "multiple of 4"),
        ("pathological", {"clients": 200}, "fewer --clients"),
        ("iid", {"clients": None}, "say --clients"),
        ("dirichlet", {"alpha": 0.0}, r"dirichlet.*alpha"),
        ("dirichlet", {"alpha": float("nan")}, r"dirichlet.*alpha"),
        ("dirichlet", {"alpha": float("inf")}, r"dirichlet.*alpha"),
        ("dirichlet", {"alhpa": 1.0}, r"unknown setting dirichlet.alhpa \(did you mean 'alpha'\?\)"),
        ("iid", {"alpha": 1.0}, "unknown setting iid.alpha"),
        ("iid", {"normalise": "pixels"}, "did you mean 'pixel'"),
        ("iid", {"noise": -1.0}, "--noise"),
        ("iid", {"noise": 1.0, "normalise": "none"}, "normalised"),
        ("iid", {"normalise": "cifar10"}, "3 channels"),
        ("synthetic", {}, "leave --dataset out"),
        ("roles", {}, "takes text with roles"),
        ("dirichlet", {"clients": 50}, "the data set gave .* fewer --clients"),
        ("dirichlet", {"clients": 15, "alpha": 0.01}, "1000 Dirichlet draws .* larger --alpha"),
    ],
)
def test_refusals(dataset_of, scheme, options, message):
    with pytest.raises(SettingError, match=message):
        partition(dataset_of([(100, 50)] * 4), scheme, **{"clients": 4, **options})


def test_a_class_without_test_samples(dataset_of):
    with pytest.raises(ShardError, match="class 10 of made has 5 training and 0 test"):
        partition(dataset_of([(5, 5), (5, 0)]), "iid", 2)


def test_digits_are_split_by_class():
    data, other = load_dataset("digits", 0), load_dataset("digits", 1)
    assert data.train_x.shape[1:] == (8, 8, 1) and data.train_x.dtype == np.uint8 and data.train_x.max() == 255
    assert len(data.train_x) + len(data.test_x) == 1797 and data.classes == list(range(10))
    total = np.bincount(data.train_y) + np.bincount(data.test_y)
    assert np.array_equal(np.bincount(data.test_y), np.rint(total / 4).astype(int))
    assert set(np.unique(data.train_x).tolist()) == {round(level * 255 / 16) for level in range(17)}
    assert not np.array_equal(data.test_x, other.test_x)


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SettingError, match=r"attune-fl\[data\]"):
        load_dataset("digits")


def test_a_data_set_of_ones_own(tmp_path: Path):
    x, y = np.arange(40).reshape(20, 2), np.array(["a", "b"] * 10)
    np.savez(tmp_path / "own.npz", train_x=x, train_y=y, test_x=x, test_y=y)
    data = load_dataset(str(tmp_path / "own.npz"))
    assert (data.name, data.kind, data.classes, data.vocabulary) == ("own", "tabular", ["a", "b"], 0)
    write_shards(tmp_path / "out", partition(data, "iid", 2))
    assert load_shard(tmp_path / "out" / "shard1").kind == "tabular"
    with pytest.raises(SettingError, match="no data set"):
        load_dataset("digit")


def test_written_shards(tmp_path: Path, dataset_of):
    parts = partition(dataset_of([(40, 20)] * 4), "pathological", 4, classes_per_client=2)
    folders = write_shards(tmp_path / "a", parts)
    assert [folder.name for folder in folders] == ["shard0", "shard1", "shard2", "shard3"]
    for folder, train, test in zip(folders, parts.train, parts.test, strict=True):
        shard = load_shard(folder)
        assert shard.train_x[:, 0].tolist() == train.tolist() and (159 - shard.test_x[:, 0]).tolist() == test.tolist()
        assert shard.profile().labels == [0, 10, 20, 30]
        assert set(np.unique(shard.train_y)) == set(np.unique(shard.test_y)) and len(np.unique(shard.train_y)) == 2
        assert json.loads((folder / "meta.json").read_text()) == {"classes": [0, 10, 20, 30], "kind": "tabular"}
    again = write_shards(tmp_path / "b", parts)
    assert all((a / "train.npz").read_bytes() == (b / "train.npz").read_bytes() for a, b in zip(folders, again, strict=True))
    with pytest.raises(ShardError, match="another partition \\(shard2, shard3\\)"):
        write_shards(tmp_path / "a", partition(parts.dataset, "iid", 2))


def test_nowhere_to_write(tmp_path: Path, dataset_of, monkeypatch):
    parts = partition(dataset_of([(4, 4)]), "iid", 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(ShardError, match="cannot write shards"):
        write_shards(tmp_path / "file", parts)
    with pytest.raises(ShardError, match="cannot write the picture"):
        save_picture(parts, tmp_path / "none" / "p.png")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(DiskFull, match="no space left"):
        write_shards(tmp_path / "out", parts)


def test_table_and_picture(tmp_path: Path, dataset_of, monkeypatch):
    parts = partition(dataset_of([(40, 20), (8, 4)]), "pathological", 2, classes_per_client=1)
    lines = table(parts).splitlines()
    assert lines[1].split() == ["client", "0", "10", "train", "test"]
    assert sorted(line.split()[1:] for line in lines[2:]) == [[".", "8", "8", "4"], ["40", ".", "40", "20"]]
    assert len({len(line) for line in lines[1:]}) == 1
    many = partition(dataset_of([(4, 2)] * 25), "iid", 2)
    assert table(many).splitlines()[2].split() == ["shard0", "25", "50", "25"]
    save_picture(parts, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SettingError, match="matplotlib"):
        save_picture(parts, tmp_path / "q.png")


@pytest.fixture
def images() -> Dataset:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (90, 4, 5, 3)).astype(np.uint8)
    x[:, 0, 0, 0] = 9  # a pixel that never changes
    y = np.arange(90) % 3
    return Dataset("made", "images", x[:60], y[:60], x[60:], y[60:], [0, 1, 2], 0)


def test_channel_and_pixel(images, monkeypatch):
    monkeypatch.setattr(samples, "_CHUNK", 7)
    channel, pixel = samples.normaliser(images, "channel"), samples.normaliser(images, "pixel")
    train, both = images.train_x / 255.0, np.concatenate([images.train_x, images.test_x]) / 255.0
    assert np.allclose(channel.mean, train.mean(axis=(0, 1, 2))) and np.allclose(channel.std, train.std(axis=(0, 1, 2)))
    assert np.allclose(pixel.mean, both.mean(axis=0)) and pixel.std[0, 0, 0] == 1.0
    assert np.allclose(pixel.std[1:], both.std(axis=0)[1:])
    made = pixel.apply(images.train_x)
    assert made.dtype == np.float32 and not made[:, 0, 0, 0].any()
    assert np.allclose(made, (train - pixel.mean) / pixel.std, atol=1e-5)


def test_the_published_constants(images):
    made = samples.normaliser(images, "cifar100").apply(np.full((1, 1, 1, 3), 255, np.uint8))
    assert np.allclose(made[0, 0, 0], [(1 - 0.5071) / 0.2673, (1 - 0.4865) / 0.2564, (1 - 0.4409) / 0.2762])
    with pytest.raises(SettingError, match="3 channels"):
        samples.normaliser(dataclasses.replace(images, train_x=images.train_x[..., :1]), "cifar10")


def test_noise_rises_with_the_client(images, tmp_path: Path):
    assert samples.noise_levels(5, 20.0).tolist() == [0, 5, 10, 15, 20] and samples.noise_levels(1, 20.0).tolist() == [0]
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
