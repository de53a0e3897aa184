"""Choice of the reader for a path. Each reader recognises its form by names, or by a first line."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from attune.common.errors import ShardError
from attune.fedclient.read_options import ReadOptions
from attune.simulation.partition.readers import cifar, idx, leaf, npz, plays, shard_folder, table_file
from attune.simulation.partition.readers.assemble import Raw, assemble
from attune.simulation.partition.samples import Source

READERS: tuple[ModuleType, ...] = (shard_folder, idx, cifar, leaf, plays, table_file, npz)
_PICKLES = {".pkl", ".pickle", ".pt", ".pth", ".joblib", ".npy"}
_ARCHIVES = {".zip", ".tar", ".tgz", ".bz2", ".xz", ".7z"}


def read(path: Path, options: ReadOptions) -> Source:
    """Read the data at `path` with the first reader that recognises it.

    Raises:
        ShardError: No reader recognises it, or the files are damaged.
        SettingError: A column is not there.
    """
    if path.suffix.lower() in _PICKLES:
        raise ShardError(f"{path}: pickles and the like can run code and are never read; save the arrays with numpy.savez")
    if set(path.suffixes[-2:]) & _ARCHIVES:
        raise ShardError(f"{path} is an archive; unpack it and give the folder")
    for reader in READERS:
        if reader.recognises(path):
            data = reader.read(path, options)
            return assemble(data, options) if isinstance(data, Raw) else data
    raise ShardError(
        f"{path} has no form that can be read: .npz, .csv, .json (LEAF), .txt (roles), a shard, or a folder of idx files, of "
        "CIFAR's binary version, of LEAF's JSON or of plays"
    )
