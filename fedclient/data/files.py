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
_MARKS = ((b"\xff\xfe\0\0", "utf-32"), (b"\0\0\xfe\xff", "utf-32"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))


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


def read_text(path: Path, limit: int | None = None, strict: bool = False) -> str:
    """Return the content of a text file, with line feeds alone as line ends.

    The file is UTF-8, or UTF-16 or UTF-32 with its mark. Otherwise it is refused if `strict`, and else read as Latin-1.

    Raises:
        ShardError: The file cannot be read, is in another encoding, or holds more than `limit` bytes (default: MAX_TEXT_BYTES).
    """
    data = read_bytes(path, MAX_TEXT_BYTES if limit is None else limit)
    marked = any(data.startswith(mark) for mark, _ in _MARKS)
    if strict and not marked and b"\0" in data:
        raise _not_utf_8(path, "it holds zero bytes, as UTF-16 without a mark does", _wide(data))
    encoding = next((name for mark, name in _MARKS if data.startswith(mark)), "utf-8-sig")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        if strict:
            raise _not_utf_8(path, f"byte {error.start + 1} is {data[error.start]:#04x}") from None
        text = data.decode("latin-1")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _wide(data: bytes) -> str:
    """Return the name of the encoding of text with zero bytes. Line ends and delimiters show where the zeros stand."""
    places = [data[first::4].count(0) for first in range(4)]
    if min(places[:2]) * 2 > len(data) // 4:
        return "UTF-32BE"
    if min(places[2:]) * 2 > len(data) // 4:
        return "UTF-32LE"
    return "UTF-16BE" if places[0] + places[2] > places[1] + places[3] else "UTF-16LE"


def _not_utf_8(path: Path, why: str, encoding: str = "WINDOWS-1252") -> ShardError:
    return ShardError(
        f"{path} is not in the encoding UTF-8 ({why}), so letters would be read wrongly: save it as UTF-8 (spreadsheet "
        f"programs call it 'CSV UTF-8'), or convert it from its encoding, such as {encoding}: iconv -f {encoding} -t UTF-8 "
        f"{path.name} > utf8-{path.name}"
    )


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
