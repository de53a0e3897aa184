"""Bytes of data sets, within limits: a file that is too large or packed is refused before it fills the memory."""

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
    """The suffix in lower case, `.gz` apart."""
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


def read_bytes(path: Path, limit: int) -> bytes:
    """All of a file, unpacked if its name ends in .gz. Errors: ShardError, also for more than `limit` bytes."""
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
    """A text file, UTF-8 or else Latin-1, with line ends as \\n. Errors: ShardError."""
    data = read_bytes(path, MAX_TEXT_BYTES if limit is None else limit)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def listed(folder: Path) -> list[Path]:
    """The files directly in a folder, by name. Errors: ShardError if it cannot be read or holds too many."""
    try:
        found = sorted(path for path in folder.iterdir() if path.is_file())
    except OSError as error:
        raise ShardError(f"cannot read {folder}: {error.strerror}") from None
    if len(found) > MAX_FILES:
        raise ShardError(f"{folder} holds {len(found)} files, more than {MAX_FILES}; point --dataset at one data set")
    return found
