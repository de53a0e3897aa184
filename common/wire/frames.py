"""A blob as frames: the unit in which blobs travel and files are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from attune.common.wire.malformed import BadOffset

FRAME_BYTES = 1 << 20  # between two asyncio ends 1 MiB is the sweet spot: smaller and larger frames are both slower


def _longest() -> int:
    return FRAME_BYTES


def read_frames(path: Path, offset: int, frame_bytes: Callable[[], int] = _longest) -> Iterator[bytes]:
    """The file from `offset` to its end, in frames as long as `frame_bytes` says each time. Errors: BadOffset, at once."""
    size = path.stat().st_size
    if not 0 <= offset <= size:
        raise BadOffset(f"cannot go on at offset {offset} of a blob of {size} bytes; start from 0")
    return _frames(path, offset, frame_bytes)


def _frames(path: Path, offset: int, frame_bytes: Callable[[], int]) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while frame := file.read(frame_bytes()):
            yield frame
