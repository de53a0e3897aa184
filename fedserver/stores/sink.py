"""An announced blob on its way in: no more than was announced, hashed as it comes, and resumable where it broke off."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import Self

from attune.common.errors import LimitExceeded
from attune.common.wire.blobs import Blob, hash_span
from attune.common.wire.digest import Digest, check_digest
from attune.common.wire.malformed import DigestMismatch, Truncated
from attune.fedserver.ports.blobs import Blobs


class Sink:
    """A blob of `size` bytes that grows under `name`, from `offset` on (bytes that are there already, which are hashed).

    Leaving it as a context manager keeps what is there.
    Errors: Malformed (bad-digest), LimitExceeded (over `max_bytes`), DiskFull, UploadBusy.
    """

    def __init__(
        self, blobs: Blobs, name: str, size: int, digest: str, *, max_bytes: int | None = None, who: str = "the peer"
    ) -> None:
        check_digest(digest, who)
        if size < 0 or (max_bytes is not None and size > max_bytes):
            raise LimitExceeded(f"{who}: announced {size} bytes; at most {max_bytes} are allowed (server.max_blob_bytes)")
        self.size, self.digest = size, digest
        self._who, self._hash = who, Digest()
        self._growing = blobs.grow(name, size)
        try:
            hash_span(self._growing, 0, self._growing.size, self._hash)
            self.offset = self._growing.size
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"Sink({self.offset}/{self.size} bytes of {self.digest[:19]} in {self._growing.name})"

    def write(self, frames: Sequence[bytes]) -> None:
        """The next frames.

        Errors: LimitExceeded where they are more than announced (none is kept), DiskFull (`offset` is still true).
        """
        total = self.offset + sum(map(len, frames))
        if total > self.size:
            raise LimitExceeded(f"{self._who}: sent {total} bytes after it had announced {self.size}")
        for frame in frames:
            self._write(memoryview(frame))

    def finish(self, name: str) -> Blob:
        """The whole blob under its final name.

        Errors: Truncated (go on at `offset`), DigestMismatch (nothing is kept), DiskFull.
        """
        if self.offset < self.size:
            raise Truncated(f"{self._who}: {self.offset} of {self.size} bytes arrived; go on at offset {self.offset}")
        if self._hash.text != self.digest:
            self._growing.remove()
            raise DigestMismatch(f"{self._who}: the bytes are not those of {self.digest[:19]}; send them again from the start")
        return self._growing.seal(name, self.digest)

    def close(self) -> None:
        """Lets go of the bytes, which stay."""
        self._growing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _write(self, frame: memoryview) -> None:
        try:
            self._growing.append(frame)
        finally:  # what a full disk has still taken counts
            self._hash.update(frame[: self._growing.size - self.offset])
            self.offset = self._growing.size
