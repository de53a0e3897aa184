"""Choice of the reader for a path. Each reader recognises its form by names, or by a first line.

The readers of other packages (entry points of the group `attune.readers`, or `attune.register`) are asked after the built-in
ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

from attune.common.errors import ShardError
from attune.common.plugins import PluginRegistry
from attune.fedclient.read_options import ReadOptions
from attune.simulation.partition.readers import cifar, idx, leaf, npz, plays, shard_folder, table_file
from attune.simulation.partition.readers.assemble import Raw, assemble
from attune.simulation.partition.samples import Source


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
