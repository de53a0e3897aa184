"""Reader of .npz files: the arrays train_x, train_y, test_x, test_y, or x and y, and further label arrays by name."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from attune.common.errors import SettingError, ShardError, nearest
from attune.fedclient.data.arrays import MAX_BINARY_BYTES, Array, names_in, read_arrays
from attune.fedclient.read_options import ReadOptions
from attune.simulation.partition.readers.assemble import Raw


def recognises(path: Path) -> bool:
    """Return whether this reader can read the path, by names or a first line."""
    return path.is_file() and path.suffix.lower() == ".npz"


def read(path: Path, options: ReadOptions) -> Raw:
    """Read the file.

    train_NAME with test_NAME, or NAME beside x and y, are label arrays. NAME_names has the names of the values 0, 1, ...

    Raises:
        ShardError: The arrays cannot be read, or are too large.
        SettingError: There is no array for --label.
    """
    held = names_in(path)
    with zipfile.ZipFile(path) as archive:
        unpacked_bytes = sum(entry.file_size for entry in archive.infolist())
    if unpacked_bytes > MAX_BINARY_BYTES:
        raise ShardError(f"{path} holds {unpacked_bytes / 2**30:.1f} GiB, more than the limit; cut it into smaller files")
    label = options.label or "y"
    if "train_x" in held:
        both = {"test_x", f"test_{label}"} & set(held)
        return _four(path, held, label) if both else _one(path, held, "train_x", f"train_{label}")
    return _one(path, held, "x", label)


def _four(path: Path, held: list[str], label: str) -> Raw:
    _check(path, f"train_{label}", held)
    names = ("train_x", f"train_{label}", "test_x", f"test_{label}")
    train_x, train_y, test_x, test_y = read_arrays(path, names)
    pairs = [name.removeprefix("train_") for name in held if name.startswith("train_") and name not in names]
    more = {}
    for name in pairs:
        if f"test_{name}" not in held:
            continue
        first, second = read_arrays(path, (f"train_{name}", f"test_{name}"))
        if first.shape == (len(train_x),) and second.shape == (len(test_x),):
            more[name] = np.concatenate([first, second])
    return Raw(path.stem, (train_x, train_y), (test_x, test_y), more, _called(path, held, more))


def _one(path: Path, held: list[str], features: str, label: str) -> Raw:
    if features in held:
        _check(path, label, held)
    x, y = read_arrays(path, (features, label))
    more = {}
    for name in held:
        if name not in (features, label):
            array = read_arrays(path, (name,))[0]
            if array.shape == (len(x),):
                more[name] = array
    return Raw(path.stem, (x, y), None, more, _called(path, held, more))


def _check(path: Path, label: str, held: list[str]) -> None:
    if label not in held:
        raise SettingError(f"{path} has no array {label!r} for the classes{nearest(label, held)}; --label names another")


def _called(path: Path, held: list[str], more: dict[str, Array]) -> dict[str, list[str]]:
    called = {}
    for name in more:
        if f"{name}_names" in held:
            names = read_arrays(path, (f"{name}_names",))[0]
            called[name] = [str(value) for value in names.reshape(-1)]
    return called
