"""Reading of data files within limits: a file that is too large is refused before it fills the memory."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from attune.common.errors import ShardError

MAX_BINARY_BYTES = 8 << 30  # of one file, unpacked
MAX_TEXT_BYTES = 1 << 30
MAX_FILES = 10_000
_GIB = 1 << 30


def plain_suffix(path: Path) -> str:
    """Return the suffix of a file name in lower case, without a `.gz` at the end."""
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


def read_bytes(path: Path, limit: int) -> bytes:
    """Return the content of a file, unpacked if its name ends in .gz.

    Raises:
        ShardError: The file cannot be read, or holds more than `limit` bytes.
    """
    try:
        if path.suffix.lower() == ".gz":
            with gzip.open(path) as file:
                data = file.read(limit + 1)
        else:
            with path.open("rb") as plain:
                data = plain.read(limit + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ShardError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    except MemoryError:
        raise ShardError(f"{path} does not fit into memory; cut it into smaller files") from None
    if len(data) > limit:
        raise ShardError(f"{path} holds more than {limit / _GIB:g} GiB, the limit; cut it into smaller files")
    return data


def read_text(path: Path, limit: int | None = None) -> str:
    """Return the content of a text file, with line feeds alone as line ends.

    A file that is not UTF-8 is read as Latin-1.

    Raises:
        ShardError: The file cannot be read, or holds more than `limit` bytes (default: MAX_TEXT_BYTES).
    """
    data = read_bytes(path, MAX_TEXT_BYTES if limit is None else limit)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def files_in(folder: Path) -> list[Path]:
    """Return the files that lie directly in a folder, sorted by name.

    Raises:
        ShardError: The folder cannot be read, or holds more than MAX_FILES files.
    """
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file())
    except OSError as error:
        raise ShardError(f"cannot read {folder}: {error.strerror}") from None
    if len(files) > MAX_FILES:
        raise ShardError(f"{folder} holds {len(files)} files, more than {MAX_FILES}; point --dataset at one data set")
    return files
