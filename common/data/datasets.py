"""Whole data sets to cut into shards: the bundled handwritten digits, or a file of one's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.data import labels
from common.data.arrays import Array
from common.data.shard import load_shard
from common.errors import SettingError
from common.plan import Kind, Label
from common.seeds import derive

DIGITS = "digits"
_TEST_SHARE = 0.25


@dataclass(frozen=True)
class Dataset:
    """Training and test samples, with the axes of their kind (common.data.kinds), and all classes in order."""

    name: str
    kind: Kind
    train_x: Array
    train_y: Array
    test_x: Array
    test_y: Array
    classes: list[Label]
    vocabulary: int  # 0 unless the kind is tokens


def load_dataset(name: str, seed: int = 0) -> Dataset:
    """`digits`, or the path of a shard (one .npz with train_x, train_y, test_x, test_y, or a folder).

    Errors: SettingError (scikit-learn missing, no such data set, or one with a label for every position, which no scheme by
    classes can cut), ShardError and its kin as `load_shard`.
    """
    if name == DIGITS:
        return _digits(seed)
    if not Path(name).exists():
        raise SettingError(
            f"no data set {name!r}: say {DIGITS}, or the path of an .npz with train_x, train_y, test_x and test_y"
        )
    shard = load_shard(Path(name), seed)
    if shard.per_position:
        raise SettingError(f"{name} has a label for every position, so its samples are of no class that it could be cut by")
    classes = shard.profile().labels
    parts = (shard.train_x, shard.train_y, shard.test_x, shard.test_y)
    return Dataset(shard.name, shard.kind, *parts, classes=classes, vocabulary=shard.vocabulary)


def _digits(seed: int) -> Dataset:
    """1,797 images of 8 x 8; a quarter of every class, drawn with `seed`, is the test part; grey levels 0..16 become 0..255."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        message = (
            "the digits come with scikit-learn, which is not installed: pip install 'attune[data]', or give the path of an .npz"
        )
        raise SettingError(message) from None
    bunch = load_digits()
    x = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., np.newaxis]
    y = bunch.target.astype(np.int64)
    generator = np.random.default_rng(derive(seed, DIGITS))
    test = np.zeros(len(y), dtype=bool)
    for label in np.unique(y):
        members = generator.permutation(np.flatnonzero(y == label))
        test[members[: round(len(members) * _TEST_SHARE)]] = True
    return Dataset(DIGITS, "images", x[~test], y[~test], x[test], y[test], labels.distinct(y), 0)
