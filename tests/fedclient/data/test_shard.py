"""Reading of shards: every kind, the hold-out, and the error for each fault."""

import zipfile
from pathlib import Path

import numpy as np
import pytest

from attune.common.errors import NonFiniteFeatures, ShardError, UndeclaredLabels
from attune.fedclient.data.shard import load_shard

X = np.arange(24.0).reshape(12, 2)
Y = np.arange(12) % 3


@pytest.mark.parametrize(
    ("kind", "shape", "vocabulary"),
    [("images", (5, 4, 1), 0), ("tokens", (6,), 200), ("series", (7, 3), 0), ("tabular", (5,), 0)],
)
def test_kind_follows_from_x(write, samples, kind, shape, vocabulary):
    x, y = samples(kind)
    if kind == "tokens":
        x[5, 1] = 199
    meta = {"kind": "tokens"} if kind == "tokens" else None
    shard = load_shard(write(x, y, test=(x[:10], y[:10]), meta=meta))
    profile = shard.profile()
    assert (shard.name, profile.kind, profile.shape, profile.vocabulary) == ("mine", kind, shape, vocabulary)
    assert (profile.labels, profile.samples, profile.test_samples, shard.warnings) == ([0, 1], 80, 10, ())


def test_other_image_forms(write):
    y = [0, 1, 2, 3]
    assert load_shard(write(np.arange(360, dtype=np.uint16).astype(np.uint8).reshape(4, 6, 5, 3), y)).profile().shape == (
        6,
        5,
        3,
    )
    assert load_shard(write(np.arange(360, dtype=np.float32).reshape(4, 6, 5, 3), y)).kind == "images"


@pytest.mark.parametrize(
    ("x", "kind", "shape"),
    [
        (np.zeros((4, 6)), "series", (6, 1)),
        (np.zeros((4, 6), np.int64), "tabular", (6,)),
        (np.arange(120.0).reshape(4, 6, 5), "images", (6, 5, 1)),
        (np.zeros((4, 6), bool), "tabular", (6,)),
        (np.zeros((4, 6, 5), np.int16), "series", (6, 5)),
    ],
)
def test_meta_overrides_the_kind(write, x, kind, shape):
    profile = load_shard(write(x, [0, 1, 0, 1], meta={"kind": kind})).profile()
    assert (profile.kind, profile.shape) == (kind, shape)


def test_hold_out_is_a_seeded_quarter(write):
    folder = write(X, Y)
    shard, again, other = load_shard(folder, 1), load_shard(folder, 1), load_shard(folder, 2)
    assert (len(shard.train_x), len(shard.test_x)) == (9, 3)
    assert np.array_equal(shard.test_x, again.test_x) and not np.array_equal(shard.test_x, other.test_x)
    together = np.concatenate([shard.train_x, shard.test_x])
    assert np.array_equal(together[together[:, 0].argsort()], X)
    assert all(Y[int(x[0]) // 2] == y for x, y in zip(shard.train_x, shard.train_y, strict=True))


def test_windows_that_overlap_are_tested_on_the_end_of_the_recording(write):
    x, y = np.arange(24 * 3, dtype=np.float32).reshape(24, 3, 1), [0, 1] * 12
    assert load_shard(write(x, y)).test_x[:, 0, 0].tolist() == [54.0, 57.0, 60.0, 63.0, 66.0, 69.0]


def test_samples_of_a_group_stay_together(write):
    x, people = np.arange(24, dtype=np.float32).reshape(12, 2), np.repeat([7, 8, 9], [3, 3, 6])
    folder = write(x, [0, 1] * 6, meta={"groups": "person"})
    with pytest.raises(ShardError, match="lacks person"):
        load_shard(folder)
    np.savez(folder / "train.npz", x=x, y=[0, 1] * 6, person=people[:5])
    with pytest.raises(ShardError, match=r"'person' of shape \(5,\)"):
        load_shard(folder)
    np.savez(folder / "train.npz", x=x, y=[0, 1] * 6, person=people)
    shard = load_shard(folder)
    assert len(shard.test_x) == 3 and len(set(shard.test_x[:, 0] // 6)) == 1, "one of the two groups of three"
    assert sorted(shard.groups.tolist()) in ([7] * 3 + [9] * 6, [8] * 3 + [9] * 6)
    assert sorted([*shard.groups, *shard.test_groups]) == sorted(people) and len(set(shard.test_groups)) == 1


def test_a_test_part_says_which_of_its_samples_belong_together_or_nothing(write):
    people = np.array([7, 7, 8])
    folder = write(X[:3], Y[:3], test=(X[:3], Y[:3]), meta={"groups": "person"})
    np.savez(folder / "train.npz", x=X[:3], y=Y[:3], person=people)
    assert load_shard(folder).test_groups is None
    np.savez(folder / "test.npz", x=X[:3], y=Y[:3], person=people[::-1])
    assert load_shard(folder).test_groups.tolist() == [8, 7, 7]
    np.savez(folder / "test.npz", x=X[:3], y=Y[:3], person=people[:2])
    with pytest.raises(ShardError, match=r"test.npz is 'person' of shape \(2,\)"):
        load_shard(folder)


def test_one_sample_is_enough(write):
    shard = load_shard(write(X[:1], Y[:1]))
    assert shard.profile().samples == 1 and shard.profile().test_samples == 0 and shard.test_x.shape == (0, 2)
    assert len(shard.warnings) == 3 and "one class" in shard.warnings[0] and "batch of 32" in shard.warnings[1]


def test_one_file_with_four_arrays(tmp_path: Path):
    path = tmp_path / "mine.npz"
    np.savez(path, train_x=X, train_y=Y, test_x=X[:2], test_y=Y[:2])
    assert load_shard(path).name == "mine" and load_shard(path).profile().test_samples == 2
    np.savez(path, train_x=X, train_y=Y)
    assert load_shard(path).profile().test_samples == 3
    np.savez(path, train_x=X, train_y=Y, test_x=X)
    with pytest.raises(ShardError, match="lacks test_y"):
        load_shard(path)


@pytest.mark.parametrize(
    ("y", "labels"),
    [
        (np.array(["b", "a", "b"]), ["a", "b"]),
        (np.array([True, False, True]), [0, 1]),
        (np.array([-7.0, 2.0, 2.0]), [-7, 2]),
        (np.array([300, 5, 5], np.uint16), [5, 300]),
    ],
)
def test_labels_become_plain_values(write, y, labels):
    found = load_shard(write(X[:3], y)).profile().labels
    assert found == labels and {type(label) for label in found} <= {int, str}


def test_declared_classes_keep_their_order(write):
    assert load_shard(write(X, Y, meta={"classes": [2, 0, 1, 9]})).profile().labels == [2, 0, 1, 9]


def test_declared_vocabulary(write):
    x = np.array([[1, 2], [3, 4]])
    assert load_shard(write(x, [0, 1], meta={"vocabulary": 50})).profile().vocabulary == 50
    with pytest.raises(ShardError, match=r"1 tokens outside the vocabulary of 4, the largest is 4"):
        load_shard(write(x, [0, 1], meta={"vocabulary": 4}))
    with pytest.raises(ShardError, match="only tokens"):
        load_shard(write(X, Y, meta={"vocabulary": 4}))


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (X[:0], Y[:0], "no training samples"),
        (X, Y[:5], "5 labels for 12 samples"),
        (X, np.zeros((12, 1)), r"shape \(12, 1\)"),
        (X, Y + 0.5, "12 labels that are no integers"),
        (X, np.full(12, np.nan), "no integers"),
        (X, np.full(12, 1 + 1j), "integers or text"),
        (X, np.full(12, b"\xff"), "neither an integer nor text"),
        (X, np.full(12, 2**63, np.uint64), "64 bits"),
        (np.float64(3), Y, "no kind"),
        (np.zeros(12), Y, "no kind"),
        (np.zeros((12, 2, 2), np.int64), Y, "no kind"),
        (X.astype(str), Y, "no kind"),
        (X.astype(complex), Y, "no kind"),
        (np.zeros((12, 0)), Y, "its samples are empty"),
    ],
)
def test_wrong_arrays(write, x, y, message):
    with pytest.raises(ShardError, match=message):
        load_shard(write(x, y))


@pytest.mark.parametrize(
    ("x", "message"),
    [(-np.ones((12, 2), np.int64), "negative tokens, the least is -1"), (np.full((12, 2), 10**9), "vocabulary of")],
)
def test_wrong_tokens(write, x, message):
    with pytest.raises(ShardError, match=message):
        load_shard(write(x, Y, meta={"kind": "tokens"}))


def test_whole_numbers_are_features_unless_something_says_tokens(write):
    x = np.arange(24).reshape(12, 2)
    shard = load_shard(write(x, Y))
    assert shard.kind == "tabular" and any("taken as F features" in note for note in shard.warnings)
    for found in (
        load_shard(write(x, Y, meta={"kind": "tokens"})),
        load_shard(write(x, Y, meta={"vocabulary": 24})),
        load_shard(write(x, x % 3, meta={})),
        load_shard(write(x, Y, meta={}), tokens=True),
    ):
        assert found.kind == "tokens" and not any("features" in note for note in found.warnings)


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"clases": [1]}, "did you mean 'classes'"),
        ({"kind": "picture"}, "kind"),
        ({"kind": "images"}, r"images need \(N, H, W\)"),
        ({"kind": "tokens"}, "need integers"),
        ({"classes": []}, "empty"),
        ({"classes": [1, 1]}, "twice"),
        ({"classes": [True]}, "classes"),
        ({"vocabulary": 0}, "at least 1"),
        ("[1]", "wrong"),
        ("{", "wrong"),
    ],
)
def test_wrong_meta(write, meta, message):
    with pytest.raises(ShardError, match=message):
        load_shard(write(X, Y, meta=meta))


def test_labels_outside_the_declared_classes(write):
    with pytest.raises(UndeclaredLabels, match=r"4 samples with labels outside the declared classes: 2;"):
        load_shard(write(X, Y, test=(X, Y), meta={"classes": [0, 1]}))


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (X[:, :1], Y, "must agree"),
        (X.astype(np.uint8), Y, "same type"),
        (X, Y.astype(str), "same type"),
        (X[:2], Y, "12 labels for 2"),
    ],
)
def test_test_part_must_fit(write, x, y, message):
    with pytest.raises(ShardError, match=message):
        load_shard(write(X, Y, test=(x, y)))


def test_non_finite_values_are_located(write):
    x = X.copy()
    x[3, 1] = x[4, 1] = np.nan
    x[4, 0] = np.inf
    with pytest.raises(
        NonFiniteFeatures, match=r"3 NaN or infinite values in 2 of 12 samples, by column \(how many\): 0 \(1\), 1 \(2\)"
    ):
        load_shard(write(x, Y))
    with pytest.raises(NonFiniteFeatures, match="test part"):
        load_shard(write(X, Y, test=(x, Y)))
    series = np.zeros((12, 4, 3))
    series[2, :, 2] = -np.inf
    with pytest.raises(
        NonFiniteFeatures, match=r"4 NaN or infinite values in 1 of 12 samples, by channel \(how many\): 2 \(4\)"
    ):
        load_shard(write(series, Y))


def test_unreadable_files(tmp_path: Path, write):
    with pytest.raises(ShardError, match="no shard at"):
        load_shard(tmp_path / "nowhere")
    with pytest.raises(ShardError, match=r"no train.npz"):
        load_shard(tmp_path)
    folder = write(X, Y)
    whole = (folder / "train.npz").read_bytes()
    for damaged in (b"", b"hello", whole[: len(whole) // 2], b"\x93NUMPY" + whole):
        (folder / "train.npz").write_bytes(damaged)
        with pytest.raises(ShardError, match=r"train\.npz"):
            load_shard(folder)
    middle = len(whole) // 3
    (folder / "train.npz").write_bytes(whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :])
    with pytest.raises(ShardError, match="damaged"):
        load_shard(folder)
    np.savez(folder / "train.npz", x=X)
    with pytest.raises(ShardError, match="lacks y; it holds x"):
        load_shard(folder)
    np.savez(folder / "train.npz", x=X, y=np.array([{}] * 12, dtype=object))
    with pytest.raises(ShardError, match=r"y in .* holds Python objects"):
        load_shard(folder)


def test_an_array_that_claims_more_than_memory(tmp_path: Path, write):
    folder = write(X, Y)
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (4000000000000, 2), }"
    header += b" " * (-(10 + len(header) + 1) % 64) + b"\n"
    with zipfile.ZipFile(folder / "train.npz", "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
        archive.writestr("y.npy", b"")
    with pytest.raises(ShardError, match=r"train\.npz"):
        load_shard(folder)
