"""Reader of idx files, the form of MNIST: a folder with train and test images and labels, with or without gzip."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from attune.common.errors import ShardError
from attune.fedclient.data.arrays import MAX_BINARY_BYTES, Array, files_in, read_bytes
from attune.fedclient.read_options import ReadOptions
from attune.simulation.partition.readers.assemble import Raw

_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def recognises(path: Path) -> bool:
    """Return whether this reader can read the path, by names or a first line."""
    return path.is_dir() and any("idx" in file.name and "ubyte" in file.name for file in files_in(path))


def read(path: Path, options: ReadOptions) -> Raw:
    """Read the four files of the folder.

    Raises:
        ShardError: A file is missing or ambiguous, is no idx file, or has another length than its header says.
    """
    train, test = (
        (parse(_only(path, words, "images")), parse(_only(path, words, "labels"))) for words in (("train",), ("t10k", "test"))
    )
    return Raw(path.resolve().name, train, test)


def _only(folder: Path, words: tuple[str, ...], what: str) -> Path:
    files = [file for file in files_in(folder) if "ubyte" in file.name and what in file.name]
    files = [file for file in files if any(word in file.name for word in words)]
    if len(files) != 1:
        held = f"{len(files)} files ({', '.join(file.name for file in files)})" if files else "no file"
        raise ShardError(
            f"{folder} holds {held} with {' or '.join(words)}, {what} and ubyte in the name; exactly one is needed"
        )
    return files[0]


def parse(path: Path) -> Array:
    """Return the array of one idx file: two zero bytes, type, number of axes, sizes as big-endian 32-bit numbers, values.

    Raises:
        ShardError: The file has another form, or another length than its header says.
    """
    data = read_bytes(path, MAX_BINARY_BYTES)
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in _TYPES or not 1 <= data[3] <= 4:
        raise ShardError(f"{path} is no idx file: it must begin with two zero bytes, a type and 1 to 4 axes")
    start = 4 + 4 * data[3]
    if len(data) < start:
        raise ShardError(f"{path} ends within its sizes; download it again")
    sizes = [int(size) for size in np.frombuffer(data, ">u4", count=data[3], offset=4)]
    kind = np.dtype(_TYPES[data[2]])
    expected = start + kind.itemsize * int(np.prod(sizes, dtype=object))
    if len(data) != expected:
        raise ShardError(f"{path} holds {len(data)} bytes, but says {expected}; download it again")
    return np.frombuffer(data, kind, offset=start).reshape(sizes).astype(kind.newbyteorder("="))
