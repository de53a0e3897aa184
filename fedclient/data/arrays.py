"""Named arrays in .npz files. Every fault of a file becomes a ShardError that names the file."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from attune.common.errors import ShardError

Array = npt.NDArray[Any]


def names_in(path: Path) -> list[str]:
    """Return the names of the arrays in the .npz file at `path`, sorted.

    Raises:
        ShardError: The file cannot be read.
    """
    return sorted(_open(path, lambda archive: {name: name for name in archive.files}))


def read_arrays(path: Path, names: Sequence[str]) -> list[Array]:
    """Return the arrays with these names, in this order, without reading the others.

    Raises:
        ShardError: The file cannot be read, or lacks one of the names.
    """

    def read(archive: Any) -> dict[str, Array]:
        missing = [name for name in names if name not in archive.files]
        if missing:
            held = ", ".join(archive.files) or "nothing"
            raise ShardError(f"{path} lacks {' and '.join(missing)}; it holds {held}, and {', '.join(names)} are needed")
        return {name: _plain(archive, name, path) for name in names}

    arrays = _open(path, read)
    return [arrays[name] for name in names]


def _plain(archive: Any, name: str, path: Path) -> Array:
    try:
        return np.asarray(archive[name])
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        message = f"{name} in {path} holds Python objects, which are never read; save it as numbers, or labels as text"
        raise ShardError(message) from None


def _open(path: Path, read: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                raise ShardError(f"{path} is not an .npz file; write it with numpy.savez")
        with np.load(path, allow_pickle=False) as archive:
            return read(archive)
    except OSError as error:
        raise ShardError(f"cannot read {path}: {error.strerror or error}") from None
    except MemoryError:
        raise ShardError(f"{path} does not fit into memory; cut it into smaller shards") from None
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
        raise ShardError(f"{path} is damaged or not an .npz file of plain arrays: {error}") from None
