"""Whole data sets to cut into shards: the bundled handwritten digits, or files of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from attune.common.errors import SettingError
from attune.common.seeds import derive
from attune.fedclient.data import labels
from attune.fedclient.read_options import ReadOptions
from attune.simulation.partition.readers.registry import read
from attune.simulation.partition.samples import Corpus, Dataset, Source

DIGITS = "digits"
_TEST_SHARE = 0.25


def load_dataset(name: str, seed: int = 0) -> Dataset:
    """As `load_source`, for a file that needs no options. Errors: as there, and SettingError for text that no scheme
    by classes can cut: with roles, or with a label for every position."""
    source = load_source(name, seed)
    if isinstance(source, Corpus):
        raise SettingError(f"{name} is text with roles; cut it with --scheme roles")
    if source.train_y.ndim == 2:
        raise SettingError(f"{name} has a label for every position, so its samples are of no class that it could be cut by")
    return source


def load_source(
    name: str, seed: int = 0, label: str = "", apart: Sequence[str] = (), shape: str = "", missing: str = "refuse"
) -> Source:
    """`digits`, or what lies at a path: docs/data.md has the forms.

    label: the column or array with the classes (its form's usual one if empty); NAME>NUMBER makes two classes of numbers.
    apart: columns that are no features. shape: of one sample, such as 28x28. missing: "median" fills in NaN.
    Errors: SettingError (no such data set, scikit-learn missing), ShardError and its kin for what is wrong with files.
    """
    options = ReadOptions.of(label, apart, shape, missing)
    if name == DIGITS:
        return _digits(seed)
    if not Path(name).exists():
        raise SettingError(f"no data set {name!r}: say {DIGITS}, or the path of a file or folder (docs/data.md has the forms)")
    return read(Path(name), options)


def _digits(seed: int) -> Dataset:
    """1,797 images of 8 x 8; a quarter of every class, drawn with `seed`, is the test part; grey levels 0..16 become 0..255."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        message = (
            "the digits come with scikit-learn, which is not installed: pip install 'attune-fl[data]', or name an .npz file"
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
