"""A blob as frames: the unit in which blobs travel and files are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from attune.common.wire.malformed import BadOffset

if TYPE_CHECKING:
    from attune.common.wire.blobs import Readable

FRAME_BYTES = 1 << 20  # between two asyncio ends 1 MiB is the sweet spot: smaller and larger frames are both slower


def _longest() -> int:
    return FRAME_BYTES


def read_frames(source: Path | Readable, offset: int, frame_bytes: Callable[[], int] = _longest) -> Iterator[bytes]:
    """What is there from `offset` to its end, in frames as long as `frame_bytes` says each time (the last may be shorter).

    A source is closed at the end, and when the iterator goes. Errors: BadOffset, at once.
    """
    size = source.stat().st_size if isinstance(source, Path) else source.size
    if not 0 <= offset <= size:
        raise BadOffset(f"cannot go on at offset {offset} of a blob of {size} bytes; start from 0")
    return _frames(source, offset, frame_bytes)


def _frames(source: Path | Readable, offset: int, frame_bytes: Callable[[], int]) -> Iterator[bytes]:
    if isinstance(source, Path):
        with source.open("rb", buffering=0) as file:
            file.seek(offset)
            while frame := file.read(frame_bytes()):
                yield frame
        return
    try:
        while frame := source.read(offset, frame_bytes()):
            yield frame
            offset += len(frame)
    finally:
        source.close()
