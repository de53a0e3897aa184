"""Frames: the unit in which blobs travel and files are read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from attune.common.wire.malformed import BadOffset

if TYPE_CHECKING:
    from attune.common.wire.blobs import Readable

FRAME_BYTES = 1 << 20  # between two asyncio ends, smaller and larger frames are both slower than 1 MiB


def _longest() -> int:
    return FRAME_BYTES


def read_frames(source: Path | Readable, offset: int, frame_bytes: Callable[[], int] = _longest) -> Iterator[bytes]:
    """Yield the bytes from `offset` to the end in frames. `frame_bytes` decides the length of each; the last may be shorter.

    A source is closed at the end, and when the iterator is closed.

    Raises:
        BadOffset: The offset is outside the blob. It is raised at the call, not at the first frame.
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


FRAME_S = 0.25
FIRST_BYTES = 1 << 16
LEAST_BYTES = 1 << 14


class Pace:
    """Frame length of one transfer, chosen by its speed so far. A frame is about a quarter of a second of the link.

    `clock` returns seconds and never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._began_s, self._sent_bytes = clock, clock(), 0

    def __repr__(self) -> str:
        return f"<Pace, frames of {self.frame_bytes()} bytes>"

    def sent(self, size: int) -> None:
        """Note that the transport has taken a frame of `size` bytes."""
        self._sent_bytes += size

    def frame_bytes(self) -> int:
        """Return the length of the next frame."""
        if not self._sent_bytes:
            return FIRST_BYTES
        rate = self._sent_bytes / max(self._clock() - self._began_s, 1e-6)
        return int(min(max(rate * FRAME_S, LEAST_BYTES), FRAME_BYTES))


def paced_frames(source: Path | Readable, offset: int) -> Iterator[bytes]:
    """Yield the bytes from `offset` on in frames whose length fits the speed of the transfer.

    Raises:
        BadOffset: The offset is outside the blob. It is raised at the call.
    """
    pace = Pace()
    return _counted(read_frames(source, offset, pace.frame_bytes), pace)


def _counted(frames: Iterator[bytes], pace: Pace) -> Iterator[bytes]:
    for frame in frames:
        yield frame
        pace.sent(len(frame))
