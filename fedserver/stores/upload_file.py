"""An upload on its way into a file: it survives a restart of the server.

An upload is written from its beginning to its end, so the file's length is how far it came: true after kill -9, for the
kernel has the bytes. After a power loss the tail may be missing or torn; then the digest at the end does not match, the
file goes and the upload starts again. That is rare, costs one transfer, and spares what preallocation needs: a second,
durable record of how far the bytes are good, with a sync every few MiB to keep it true.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from attune.common.durable import disk_errors, sync_with_name
from attune.common.errors import LimitExceeded, UploadBusy
from attune.common.wire.blobs import Blob, check_space, hash_span, write_all
from attune.common.wire.digest import Digest, check_digest
from attune.common.wire.malformed import DigestMismatch, Truncated


class FileSink:
    """An announced blob of `size` bytes on its way into a file, from `offset` on (bytes that are there already).

    Opening reads and hashes what is there; a file that is longer than announced is begun anew. A lock makes sure that no second
    sink writes the same file, so that the digest speaks of the bytes in it. Leaving it as a context manager keeps the file.
    Errors: Malformed (bad-digest), LimitExceeded (over `max_bytes`), DiskFull, UploadBusy.
    """

    def __init__(self, path: Path, size: int, digest: str, *, max_bytes: int | None = None, who: str = "the peer") -> None:
        check_digest(digest, who)
        if size < 0 or (max_bytes is not None and size > max_bytes):
            raise LimitExceeded(f"{who}: announced {size} bytes; at most {max_bytes} are allowed (server.max_blob_bytes)")
        self.path, self.size, self.digest, self.offset = path, size, digest, 0
        self._who, self._hash = who, Digest()
        self._fd = _open_locked(path)
        try:
            with disk_errors(path):
                self._take_up()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"FileSink({self.offset}/{self.size} bytes of {self.digest[:12]} in {self.path})"

    def write(self, frames: Sequence[bytes]) -> None:
        """The next frames.

        Errors: LimitExceeded where they are more than announced (none is kept), DiskFull (`offset` is still true).
        """
        total = self.offset + sum(map(len, frames))
        if total > self.size:
            raise LimitExceeded(f"{self._who}: sent {total} bytes after it had announced {self.size}")
        with disk_errors(self.path):
            for frame in frames:
                self._write(memoryview(frame))

    def finish(self, durable: bool = True) -> Blob:
        """The whole file; on stable storage, with its name, if `durable`.

        Errors: Truncated (the file stays, go on at `offset`), DigestMismatch (the file is removed), DiskFull.
        """
        if self.offset < self.size:
            raise Truncated(f"{self._who}: {self.offset} of {self.size} bytes arrived; go on at offset {self.offset}")
        if self._hash.text != self.digest:
            self.path.unlink(missing_ok=True)
            self.close()
            raise DigestMismatch(f"{self._who}: the bytes are not those of {self.digest[:12]}; send them again from the start")
        if durable:
            with disk_errors(self.path):
                sync_with_name(self.path)
        self.close()
        return Blob(self.path, self.digest, self.size)

    def close(self) -> None:
        """Lets go of the file, which stays as it is."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _take_up(self) -> None:
        there = os.fstat(self._fd).st_size
        if there > self.size:
            os.ftruncate(self._fd, 0)
            there = 0
        check_space(self.path, self.size - there)
        hash_span(self._fd, 0, there, self._hash, self._who)
        self.offset = there

    def _write(self, frame: memoryview) -> None:
        done = 0
        for count in write_all(self._fd, frame, self.offset):
            self._hash.update(frame[done : done + count])
            done += count
            self.offset += count


def _open_locked(path: Path) -> int:
    """The file of this name, locked. The lock may come just after its last holder renamed or removed the file: look again."""
    while True:
        with disk_errors(path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(fd)
            raise UploadBusy(f"an upload to {path.name} is open already; close it, then go on") from None
        os.close(fd)
