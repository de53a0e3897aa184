"""A blob on disk: its digest, and reads and writes whose errors say what to do (no torch here)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from attune.common.errors import DiskFull
from attune.common.wire.digest import Digest
from attune.common.wire.frames import FRAME_BYTES
from attune.common.wire.malformed import Truncated


@dataclass(frozen=True)
class Blob:
    """A whole file of tensors. `digest` is of all its bytes (common.wire.digest); `size` is in bytes."""

    path: Path
    digest: str
    size: int


def check_space(path: Path, needed_bytes: int) -> None:
    """Errors: DiskFull, before the first byte is written, where `needed_bytes` more do not fit beside `path`."""
    free_bytes = shutil.disk_usage(path.parent).free
    if needed_bytes > free_bytes:
        missing_mib = (needed_bytes - free_bytes + FRAME_BYTES - 1) // FRAME_BYTES
        raise DiskFull(f"the disk of {path.parent} has too little space for {path.name}: free another {missing_mib} MiB")


def write_all(fd: int, data: memoryview, offset: int) -> Iterator[int]:
    """Writes `data` at `offset`, yielding how many bytes each call to the kernel took: what is yielded is in the file."""
    done = 0
    while done < len(data):
        count = os.pwrite(fd, data[done:], offset + done)
        done += count
        yield count


def read_into(fd: int, target: memoryview, offset: int, who: str) -> None:
    """Fills `target` from `offset`. Errors: Truncated where the file ends too early."""
    done = 0
    while done < len(target):
        count = os.preadv(fd, [target[done:]], offset + done)
        if count == 0:
            raise Truncated(f"{who}: the file ends {len(target) - done} bytes too early; it was changed while in use")
        done += count


def hash_span(fd: int, start: int, end: int, digest: Digest, who: str) -> None:
    """Feeds the bytes [start, end) of a file to `digest`, frame by frame through one buffer."""
    buffer = memoryview(bytearray(min(FRAME_BYTES, end - start)))
    for offset in range(start, end, FRAME_BYTES):
        piece = buffer[: min(FRAME_BYTES, end - offset)]
        read_into(fd, piece, offset, who)
        digest.update(piece)
