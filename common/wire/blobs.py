"""Blobs: named bytes with a digest, the sources and targets for reading and writing them, and the frames in which they travel.

Sources and targets are interfaces, because the server's blobs need not be files. The implementations for local files and memory
are here. A frame holds what the link carries in a quarter of a second. This module does not import torch.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec
from typing_extensions import Self

from attune.common.durable import disk_errors, sync_with_name
from attune.common.errors import DiskFull
from attune.common.wire.digest import Digest
from attune.common.wire.malformed import BadOffset, Truncated

FRAME_BYTES = 1 << 20  # between two asyncio ends, smaller and larger frames are both slower than 1 MiB
FRAME_S = 0.25
FIRST_BYTES = 1 << 16
LEAST_BYTES = 1 << 14


class Blob(msgspec.Struct, frozen=True):
    """Reference to immutable bytes.

    Attributes:
        name: Name in the store that holds the bytes.
        digest: Digest of all bytes.
        size: Number of bytes.
    """

    name: str
    digest: str
    size: int


class Readable(Protocol):
    """Source of bytes, read by position. Several threads may read. Reading after `close` raises OSError."""

    @property
    def name(self) -> str:
        """Name of the source in errors."""
        ...

    @property
    def size(self) -> int: ...

    def read(self, offset: int, count: int) -> bytes:
        """Return `count` bytes from `offset` on, fewer only at the end of the source."""
        ...

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` with the bytes from `offset` on.

        Raises:
            Truncated: The source ends too early.
        """
        ...

    def close(self) -> None:
        """Close the source. Closing twice is allowed."""
        ...


class Target(Protocol):
    """Blob that is being written, at any position in any order."""

    @property
    def name(self) -> str:
        """Name of the target in errors."""
        ...

    def write(self, data: memoryview, offset: int) -> None:
        """Write `data` at `offset`.

        Raises:
            DiskFull: The disk has no room.
        """
        ...

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` with written bytes from `offset` on.

        Raises:
            Truncated: Fewer bytes were written.
        """
        ...

    def finish(self, digest: str, size: int) -> Blob:
        """Publish the blob under its name. All bytes are written, and `digest` is theirs.

        Raises:
            DiskFull: The disk has no room.
        """
        ...

    def abort(self) -> None:
        """Remove everything that was written. No-op after `finish`."""
        ...


class LocalFile:
    """File as a source. A file that shrinks meanwhile raises Truncated; a memory map would crash the process."""

    def __init__(self, path: Path, name: str = "") -> None:
        self.name = name or str(path)
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._fd).st_size

    def __repr__(self) -> str:
        return f"LocalFile({self.name}, {self.size} bytes)"

    def read(self, offset: int, count: int) -> bytes:
        pieces = []
        while count and (piece := os.pread(self._fd, count, offset)):
            pieces.append(piece)
            offset, count = offset + len(piece), count - len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def read_into(self, target: memoryview, offset: int) -> None:
        read_into(self._fd, target, offset, self.name)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()


class LocalTarget:
    """File of `size` bytes that is written under its final name, so readers can see it unfinished.

    With `durable`, the file and its name are on stable storage after `finish`. DiskFull is raised before the first byte if the
    disk has no room, and later if it fills up.
    """

    def __init__(self, path: Path, size: int, durable: bool = False) -> None:
        self.path, self.name, self._durable = path, str(path), durable
        check_space(path, size)
        with disk_errors(path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def write(self, data: memoryview, offset: int) -> None:
        with disk_errors(self.path):
            for _ in write_all(self._fd, data, offset):
                pass

    def read_into(self, target: memoryview, offset: int) -> None:
        read_into(self._fd, target, offset, self.name)

    def finish(self, digest: str, size: int) -> Blob:
        with disk_errors(self.path):
            if self._durable:
                sync_with_name(self.path)
        self._release()
        return Blob(self.path.name, digest, size)

    def abort(self) -> None:
        if self._fd >= 0:
            self._release()
            self.path.unlink(missing_ok=True)

    def _release(self) -> None:
        os.close(self._fd)
        self._fd = -1


class Buffer:
    """Source of bytes in memory."""

    def __init__(self, name: str, data: bytes | bytearray) -> None:
        self.name, self.size = name, len(data)
        self._data: memoryview | None = memoryview(data)

    def __repr__(self) -> str:
        return f"Buffer({self.name}, {self.size} bytes)"

    def read(self, offset: int, count: int) -> bytes:
        if self._data is None:
            raise OSError(errno.EBADF, "Bad file: closed", self.name)
        return bytes(self._data[offset : offset + count])

    def read_into(self, target: memoryview, offset: int) -> None:
        end = offset + len(target)
        if end > self.size:
            raise Truncated(f"{self.name}: ends {end - self.size} bytes too early")
        if self._data is None:
            raise OSError(errno.EBADF, "Bad file: closed", self.name)
        target[:] = self._data[offset:end]

    def close(self) -> None:
        self._data = None


def check_space(path: Path, needed_bytes: int) -> None:
    """Check that `needed_bytes` more fit on the disk of `path`.

    Raises:
        DiskFull: They do not fit.
    """
    free_bytes = shutil.disk_usage(path.parent).free
    if needed_bytes > free_bytes:
        missing_mib = (needed_bytes - free_bytes + FRAME_BYTES - 1) // FRAME_BYTES
        raise DiskFull(f"the disk of {path.parent} has too little space for {path.name}: free another {missing_mib} MiB")


def write_all(fd: int, data: memoryview, offset: int) -> Iterator[int]:
    """Write `data` at `offset`, and yield how many bytes each call to the kernel has written."""
    done = 0
    while done < len(data):
        count = os.pwrite(fd, data[done:], offset + done)
        done += count
        yield count


def read_into(fd: int, target: memoryview, offset: int, who: str) -> None:
    """Fill `target` with the bytes from `offset` on.

    Raises:
        Truncated: The file ends too early.
    """
    done = 0
    while done < len(target):
        count = os.preadv(fd, [target[done:]], offset + done)
        if count == 0:
            raise Truncated(f"{who}: the file ends {len(target) - done} bytes too early; it was changed while in use")
        done += count


def hash_span(read: Callable[[memoryview, int], None], start: int, end: int, digest: Digest) -> None:
    """Add the bytes [start, end) to `digest`, frame by frame through one buffer. `read` fills a buffer from an offset on.

    Raises:
        Truncated: The source ends too early.
    """
    buffer = memoryview(bytearray(min(FRAME_BYTES, end - start)))
    for offset in range(start, end, FRAME_BYTES):
        piece = buffer[: min(FRAME_BYTES, end - offset)]
        read(piece, offset)
        digest.update(piece)


def digest_in(source: Readable) -> str:
    """Return the digest of all bytes of a source.

    Raises:
        Truncated: The source ends too early.
    """
    digest = Digest()
    hash_span(source.read_into, 0, source.size, digest)
    return digest.text


def all_bytes(source: Path | Readable) -> bytes:
    """Return the bytes of a small source, and close it."""
    opened = LocalFile(source) if isinstance(source, Path) else source
    try:
        return opened.read(0, opened.size)
    finally:
        opened.close()


def read_frames(source: Path | Readable, offset: int, frame_bytes: Callable[[], int] = lambda: FRAME_BYTES) -> Iterator[bytes]:
    """Yield the bytes from `offset` to the end in frames. `frame_bytes` decides the length of each; the last may be shorter.

    A source is closed at the end, and when the iterator is closed.

    Raises:
        BadOffset: The offset is outside the blob. It is raised at the call, not at the first frame.
    """
    opened = LocalFile(source) if isinstance(source, Path) else source
    if not 0 <= offset <= opened.size:
        raise BadOffset(f"cannot go on at offset {offset} of a blob of {opened.size} bytes; start from 0")
    return _frames(opened, offset, frame_bytes)


def _frames(source: Readable, offset: int, frame_bytes: Callable[[], int]) -> Iterator[bytes]:
    try:
        while frame := source.read(offset, frame_bytes()):
            yield frame
            offset += len(frame)
    finally:
        source.close()


class Pace:
    """Frame length of one transfer, chosen by its speed so far. A frame is about a quarter of a second of the link.

    A frame is at most twice as long as the one before: buffers of this machine take the first ones at once, whatever the link,
    and a frame that is cut off is sent again.

    `clock` returns seconds and never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._began_s, self._sent_bytes, self._last_bytes = clock, clock(), 0, 0

    def sent(self, size: int) -> None:
        """Note that the transport has taken a frame of `size` bytes."""
        self._sent_bytes += size
        self._last_bytes = max(size, LEAST_BYTES)

    def frame_bytes(self) -> int:
        """Return the length of the next frame."""
        if not self._sent_bytes:
            return FIRST_BYTES
        rate = self._sent_bytes / max(self._clock() - self._began_s, 1e-6)
        return int(min(max(rate * FRAME_S, LEAST_BYTES), 2 * self._last_bytes, FRAME_BYTES))


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
