"""Whole data sets to cut into shards: the bundled handwritten digits, or the user's files.

Each reader of files recognises its form by names, or by a first line. The readers of other packages (entry points of the group
`attune.readers`, or `attune.register`) are asked after the built-in ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from attune.common.errors import SettingError, ShardError
from attune.common.plugins import PluginRegistry
from attune.common.seeds import derive
from attune.fedclient.data import labels
from attune.fedclient.data.table import is_table
from attune.fedclient.read_options import PLAIN, ReadOptions
from attune.simulation.partition.readers import cifar, idx, leaf, npz, plays, shard_folder, table_file
from attune.simulation.partition.readers.assemble import Raw, assemble
from attune.simulation.partition.samples import Dataset, Source, with_classes

DIGITS = "digits"
_TEST_SHARE = 0.25


@runtime_checkable
class Reader(Protocol):
    """Module or object that reads data sets of one form."""

    def recognises(self, path: Path) -> bool:
        """Return whether this reader can read the path, by names or a first line."""

    def read(self, path: Path, options: ReadOptions) -> Raw | Source:
        """Read the data at the path."""


BUILT_IN: dict[str, Reader] = {
    "shard": shard_folder,
    "idx": idx,
    "cifar": cifar,
    "leaf": leaf,
    "plays": plays,
    "table": table_file,
    "npz": npz,
}
READERS: PluginRegistry[Reader] = PluginRegistry("readers", Reader, BUILT_IN)
_PICKLES = {".pkl", ".pickle", ".pt", ".pth", ".joblib", ".npy"}
_ARCHIVES = {".zip", ".tar", ".tgz", ".bz2", ".xz", ".7z"}


def load_dataset(name: str, seed: int = 0) -> Dataset:
    """Return a data set that needs no options and has one class per sample.

    Raises:
        SettingError: As in `with_classes`.
        ShardError: As in `load_source`.
    """
    return with_classes(load_source(name, seed), name)


def load_source(name: str, seed: int = 0, options: ReadOptions = PLAIN) -> Source:
    """Return the bundled digits, or the data at a path (docs/data.md has the forms).

    Args:
        name: `digits`, or a path.
        seed: Decides which digits are the test part.
        options: How the files are read. An empty label means the usual one of the form.

    Raises:
        SettingError: There is no such data set, an option does not apply to it, or scikit-learn is not installed.
        ShardError: The files cannot be read, or do not fit together.
    """
    if options.key and (name == DIGITS or not is_table(Path(name))):
        raise SettingError(f"--key is of tables, and {name} is none: leave it out")
    if name == DIGITS:
        return _digits(seed)
    if not Path(name).exists():
        raise SettingError(f"no data set {name!r}: say {DIGITS}, or the path of a file or folder (docs/data.md has the forms)")
    return read(Path(name), options)


def _digits(seed: int) -> Dataset:
    """Return 1,797 images of 8 x 8 with grey levels 0 to 255. A quarter of every class, drawn with `seed`, is the test part."""
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


def read(path: Path, options: ReadOptions) -> Source:
    """Read the data at `path` with the first reader that recognises it.

    Raises:
        ShardError: No reader recognises it, or the files are damaged.
        SettingError: A column is not there, or two packages offer one reader.
    """
    if path.suffix.lower() in _PICKLES:
        raise ShardError(f"{path}: pickles and the like can run code and are never read; save the arrays with numpy.savez")
    if set(path.suffixes[-2:]) & _ARCHIVES:
        raise ShardError(f"{path} is an archive; unpack it and give the folder")
    for reader in READERS.values():
        if reader.recognises(path):
            data = reader.read(path, options)
            return assemble(data, options) if isinstance(data, Raw) else data
    raise ShardError(
        f"{path} has no form that can be read: .npz, .csv, .json (LEAF), .txt (roles), a shard, or a folder of idx files, of "
        "CIFAR's binary version, of LEAF's JSON or of plays"
    )
