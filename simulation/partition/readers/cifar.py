"""Reader of CIFAR-10 and CIFAR-100 in their binary version: records of one or two label bytes and 3 x 32 x 32 colour bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from attune.common.errors import ShardError
from attune.fedclient.data.arrays import MAX_BINARY_BYTES, Array, files_in, read_bytes
from attune.fedclient.read_options import ReadOptions
from attune.simulation.partition.readers.assemble import Raw

_PIXELS = 3 * 32 * 32
_PICKLED = {"data_batch_1", "test_batch", "batches.meta"}
_PICKLED_100 = {"train", "test", "meta"}


def recognises(path: Path) -> bool:
    """Return whether the folder holds CIFAR in one of its versions. `read` refuses the pickled one with a reason."""
    if not path.is_dir():
        return False
    names = {file.name for file in files_in(path)}
    binary = "train.bin" in names or "data_batch_1.bin" in names
    return binary or bool(_PICKLED & names) or names >= _PICKLED_100


def read(path: Path, options: ReadOptions) -> Raw:
    """Read the folder. CIFAR-100's coarse classes become the label array `coarse`.

    Raises:
        ShardError: A file is damaged, or only the pickled version is there.
    """
    names = [file.name for file in files_in(path)]
    if "train.bin" in names:
        return _hundred(path)
    batches = sorted(name for name in names if name.startswith("data_batch_") and name.endswith(".bin"))
    if not batches:
        raise ShardError(
            f"{path} holds the Python version of CIFAR, which is pickled and therefore never read: a pickle can run code; "
            "download the binary version (cifar-10-binary.tar.gz or cifar-100-binary.tar.gz) and unpack it"
        )
    train = np.concatenate([_records(path / name, 1) for name in batches])
    test = _records(path / "test_batch.bin", 1)
    return Raw(path.resolve().name, (_images(train, 1), train[:, 0]), (_images(test, 1), test[:, 0]))


def _hundred(path: Path) -> Raw:
    train, test = (_records(path / name, 2) for name in ("train.bin", "test.bin"))
    coarse = np.concatenate([train[:, 0], test[:, 0]])
    return Raw(path.resolve().name, (_images(train, 2), train[:, 1]), (_images(test, 2), test[:, 1]), more={"coarse": coarse})


def _records(path: Path, labels: int) -> Array:
    data = read_bytes(path, MAX_BINARY_BYTES)
    size = labels + _PIXELS
    if not data or len(data) % size:
        raise ShardError(f"{path} holds {len(data)} bytes, which is no whole number of records of {size}; download it again")
    return np.frombuffer(data, np.uint8).reshape(-1, size)


def _images(records: Array, labels: int) -> Array:
    """Return images (N, 32, 32, 3) from records with one plane per colour."""
    planes = records[:, labels:].reshape(-1, 3, 32, 32)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
