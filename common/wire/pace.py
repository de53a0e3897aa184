"""How long a frame should be: a quarter of a second of what the link carries, so that every frame that arrives shows life."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from attune.common.wire.blobs import Readable
from attune.common.wire.frames import FRAME_BYTES, read_frames

FRAME_S = 0.25
FIRST_BYTES = 1 << 16
LEAST_BYTES = 1 << 14


class Pace:
    """Of one transfer, by the bytes that the transport has taken since its beginning. `clock`: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._began_s, self._sent_bytes = clock, clock(), 0

    def __repr__(self) -> str:
        return f"<Pace, frames of {self.frame_bytes()} bytes>"

    def sent(self, size: int) -> None:
        """The transport has taken a frame of `size` bytes."""
        self._sent_bytes += size

    def frame_bytes(self) -> int:
        """The size of the next frame."""
        if not self._sent_bytes:
            return FIRST_BYTES
        rate = self._sent_bytes / max(self._clock() - self._began_s, 1e-6)
        return int(min(max(rate * FRAME_S, LEAST_BYTES), FRAME_BYTES))


def paced_frames(source: Path | Readable, offset: int) -> Iterator[bytes]:
    """What is there from `offset` on, in frames that fit the pace at which they are asked for. Errors: BadOffset, at once."""
    pace = Pace()
    return _counted(read_frames(source, offset, pace.frame_bytes), pace)


def _counted(frames: Iterator[bytes], pace: Pace) -> Iterator[bytes]:
    for frame in frames:
        yield frame
        pace.sent(len(frame))
