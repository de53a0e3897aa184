"""Uploads by device and part: announced, checked against what was announced, and taken over by a newer stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import Lock
from typing import get_args

from attune.common.errors import LimitExceeded, UnknownBlob, UpdateRefused, UploadTakenOver
from attune.common.exchange.messages import UploadTarget
from attune.common.methods.method import PartKind
from attune.common.wire.blobs import Blob, hash_span
from attune.common.wire.digest import Digest, check_digest
from attune.common.wire.malformed import DigestMismatch, Truncated
from attune.fedserver.ports.blobs import Damaged, Spool
from attune.fedserver.ports.storage import Storage

PARTS = tuple(kind for kind in get_args(PartKind) if kind != "private")


class Sink:
    """An announced upload of `size` bytes from `offset` on: no more than was announced, hashed as it comes.

    The bytes before `offset` are here already.

    Raises:
        Malformed: The digest is none (bad-digest).
        LimitExceeded: The size is over `max_bytes`.
        DiskFull, UploadBusy: As for `Spool.grow`.
    """

    def __init__(
        self, spool: Spool, sender: str, size: int, digest: str, *, max_bytes: int | None = None, who: str = "the peer"
    ) -> None:
        check_digest(digest, who)
        if size < 0 or (max_bytes is not None and size > max_bytes):
            raise LimitExceeded(f"{who}: announced {size} bytes; at most {max_bytes} are allowed (server.max_blob_bytes)")
        self.size, self.digest = size, digest
        self._who, self._hash = who, Digest()
        self._growing = spool.grow(sender, digest, size)
        try:
            self.offset = self._growing.size
            if self.offset:
                hash_span(self._growing.read_into, 0, self.offset, self._hash)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"Sink({self.offset}/{self.size} bytes of {self.digest[:19]} in {self._growing.name})"

    def write(self, frames: Sequence[bytes]) -> None:
        """Append the next frames.

        Raises:
            LimitExceeded: They are more than announced; none is kept.
            DiskFull: The disk is full; `offset` is still true.
        """
        total = self.offset + sum(map(len, frames))
        if total > self.size:
            raise LimitExceeded(f"{self._who}: sent {total} bytes after it had announced {self.size}")
        for frame in frames:
            self._write(memoryview(frame))

    def finish(self) -> Blob:
        """Return the whole upload as a blob.

        Raises:
            Truncated: Bytes are missing; go on at `offset`.
            DigestMismatch: The bytes are others than announced; they are removed.
            DiskFull: The disk is full.
        """
        if self.offset < self.size:
            raise Truncated(f"{self._who}: {self.offset} of {self.size} bytes arrived; go on at offset {self.offset}")
        if self._hash.text != self.digest:
            self._growing.remove()
            raise DigestMismatch(f"{self._who}: the bytes are not those of {self.digest[:19]}; send them again from the start")
        return self._growing.seal()

    def close(self) -> None:
        """Close the upload; the bytes stay."""
        self._growing.close()

    def _write(self, frame: memoryview) -> None:
        try:
            self._growing.append(frame)
        finally:  # what a full disk has still taken counts
            size = self._growing.size
            self._hash.update(frame[: size - self.offset])
            self.offset = size


class Uploads:
    """The uploads of all devices, one for each device and part. Called from several disk threads.

    Each device's part has a lock, so that a take-over never meets a write half-way.
    """

    def __init__(self, storage: Storage) -> None:
        self._spool, self._blobs = storage.spool, storage.blobs
        self._open: dict[tuple[str, str], Sink] = {}
        self._locks: dict[tuple[str, str], Lock] = {}

    def sink(self, client: str, target: UploadTarget, max_bytes: int) -> Sink:
        """Open an upload to append to it. A stream that held it is cut off, and other digests of the part go.

        Raises:
            LimitExceeded, DiskFull: As for `Sink`.
            UpdateRefused, Malformed: The part or the digest is none.
        """
        with self._lock(client, target.part):
            self._open[client, target.part] = sink = self._begun(client, target, max_bytes)
        return sink

    def _begun(self, client: str, target: UploadTarget, max_bytes: int) -> Sink:
        sender = self._sender(client, target.part, target.digest)
        older = self._open.pop((client, target.part), None)
        if older is not None:
            older.close()
        self._spool.keep_only(sender, target.digest)
        return Sink(self._spool, sender, target.size, target.digest, max_bytes=max_bytes, who=client)

    def write(self, client: str, part: str, sink: Sink, frames: Sequence[bytes]) -> None:
        """Append the next frames.

        Raises:
            UploadTakenOver: A newer stream has taken the upload over.
            LimitExceeded, DiskFull: As for `Sink.write`.
        """
        with self._lock(client, part):
            self._check_current(client, part, sink)
            sink.write(frames)

    def bring(self, client: str, target: UploadTarget, max_bytes: int, data: bytes) -> Blob:
        """Take a whole upload at once, and return it. Raises as `sink`, `write` and `complete` do."""
        with self._lock(client, target.part):
            sink = self._begun(client, target, max_bytes)
            try:
                sink.write([data[sink.offset :]])
                return sink.finish()
            finally:
                sink.close()

    def sync(self, blobs: Iterable[Blob]) -> None:
        """Make blobs durable.

        Raises:
            DiskFull: The disk is full.
        """
        for blob in blobs:
            self._blobs.sync(blob)

    def offset(self, client: str, target: UploadTarget) -> int:
        """Return how many bytes of an announced upload are here."""
        return self._spool.offset(self._sender(client, target.part, target.digest), target.digest)

    def complete(self, client: str, part: str, sink: Sink) -> Blob:
        """Check the digest. Only then can an update name the blob, which is durable when that is accepted.

        Raises:
            UploadTakenOver: A newer stream has taken the upload over.
            Truncated, DigestMismatch, DiskFull: As for `Sink.finish`.
        """
        with self._lock(client, part):
            self._check_current(client, part, sink)
            blob = sink.finish()
            del self._open[client, part]
        return blob

    def take(self, client: str, part: str, digest: str) -> Blob:
        """Return the complete upload that an update names.

        Raises:
            UnknownBlob: It is not (or no longer) here, or is damaged.
        """
        blob = self._spool.sealed(self._sender(client, part, digest), digest)
        if blob is None:
            raise UnknownBlob(f"{client}'s update names {part} {digest[:19]}, which is not here: upload it, then submit again")
        try:
            self._blobs.open(blob).close()
        except Damaged as damaged:
            self._blobs.remove([blob.name])
            raise UnknownBlob(f"{damaged}, or upload it again, then submit again") from None
        return blob

    def discard(self, blobs: Iterable[Blob]) -> None:
        """Remove complete uploads that were accepted, and what was made of them."""
        self._blobs.remove([blob.name for blob in blobs])

    def _lock(self, client: str, part: str) -> Lock:
        return self._locks.setdefault((client, part), Lock())

    def _check_current(self, client: str, part: str, sink: Sink) -> None:
        if self._open.get((client, part)) is not sink:
            raise UploadTakenOver(f"a newer stream of {client} goes on with {part}")

    def _sender(self, client: str, part: str, digest: str) -> str:
        """Return the sender of a device's part.

        Raises:
            UpdateRefused, Malformed: Part or digest could name something else than an upload of this device.
        """
        if part not in PARTS:
            raise UpdateRefused(f"{client} named {part[:40]!r}, which is no part of an update")
        check_digest(digest, client)
        return f"{client}/{part}"
