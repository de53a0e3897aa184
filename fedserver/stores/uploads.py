"""Blobs on their way in: one resumable upload a device and part. A newer stream takes it over from an older one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import Lock
from typing import get_args

from attune.common.errors import UnknownBlob, UpdateRefused, UploadTakenOver
from attune.common.exchange.messages import UploadTarget
from attune.common.methods.method import PartKind
from attune.common.wire.blobs import Blob
from attune.common.wire.digest import check_digest, file_name, from_file_name
from attune.fedserver.ports.blobs import UPLOADS, Blobs, Damaged
from attune.fedserver.stores.sink import Sink

PARTS = tuple(kind for kind in get_args(PartKind) if kind != "private")
WHOLE = ".complete"  # ends the name of an upload whose digest was right


class Uploads:
    """Called from several disk threads. Each device's part has a lock, so that a take-over never meets a write half-way."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._open: dict[tuple[str, str], Sink] = {}
        self._locks: dict[tuple[str, str], Lock] = {}

    def sink(self, client: str, target: UploadTarget, max_bytes: int) -> Sink:
        """What to append to, at its present length. Whoever held it before is cut off, and other digests of the part go.

        Errors: LimitExceeded, DiskFull, UpdateRefused for a part or digest that is none.
        """
        name = self._name(client, target.part, target.digest)
        with self._lock(client, target.part):
            older = self._open.pop((client, target.part), None)
            if older is not None:
                older.close()
            present = self._blobs.names(f"{UPLOADS}{client}/{target.part}.")
            self._blobs.remove([other for other in present if other not in (name, _whole(name))])
            whole = self._whole(client, target.part, target.digest)
            if whole is not None:  # uploaded, but never submitted: the device goes on at its end
                self._blobs.move(whole, name)
            sink = Sink(self._blobs, name, target.size, target.digest, max_bytes=max_bytes, who=client)
            self._open[client, target.part] = sink
        return sink

    def write(self, client: str, part: str, sink: Sink, frames: Sequence[bytes]) -> None:
        """The next frames. Errors: UploadTakenOver if a newer stream has taken the upload over, LimitExceeded, DiskFull."""
        with self._lock(client, part):
            self._check_current(client, part, sink)
            sink.write(frames)

    def bring(self, client: str, target: UploadTarget, max_bytes: int, data: bytes) -> None:
        """A whole blob at once. Errors: those of `sink`, `write` and `complete`."""
        sink = self.sink(client, target, max_bytes)
        self.write(client, target.part, sink, [data[sink.offset :]])
        self.complete(client, target.part, sink)

    def sync(self, blobs: Iterable[Blob]) -> None:
        """Makes complete blobs durable. Errors: DiskFull."""
        for blob in blobs:
            self._blobs.sync(blob)

    def offset(self, client: str, target: UploadTarget) -> int:
        """How many bytes of the target are here."""
        name = self._name(client, target.part, target.digest)
        whole = self._blobs.size(_whole(name))
        return whole if whole is not None else self._blobs.size(name) or 0

    def complete(self, client: str, part: str, sink: Sink) -> None:
        """Checks the digest; only then can an update name the blob, which is durable when that is accepted.

        Errors: UploadTakenOver as for `write`, Truncated, DigestMismatch, DiskFull.
        """
        with self._lock(client, part):
            self._check_current(client, part, sink)
            sink.finish(_whole(self._name(client, part, sink.digest)))
            del self._open[client, part]

    def take(self, client: str, part: str, digest: str) -> Blob:
        """The complete blob that an update names. Errors: UnknownBlob if it is not (or no longer) here, or is damaged."""
        blob = self._whole(client, part, digest)
        if blob is None:
            raise UnknownBlob(f"{client}'s update names {part} {digest[:19]}, which is not here: upload it, then submit again")
        try:
            self._blobs.open(blob).close()
        except Damaged as damaged:
            self._blobs.remove([blob.name])
            raise UnknownBlob(f"{damaged}, or upload it again, then submit again") from None
        return blob

    def discard(self, blobs: Iterable[Blob]) -> None:
        """Complete blobs whose values were accepted in another form."""
        self._blobs.remove([blob.name for blob in blobs])

    def damaged(self) -> list[str]:
        """A line for each complete blob whose bytes are not those that were sent."""
        found = []
        for name in self._blobs.names(UPLOADS):
            if name.endswith(WHOLE):
                digest = name.removesuffix(WHOLE).rpartition(".")[2]
                try:
                    self._blobs.check(Blob(name, from_file_name(digest), self._blobs.size(name) or 0))
                except Damaged as damaged:
                    found.append(str(damaged))
        return found

    def _whole(self, client: str, part: str, digest: str) -> Blob | None:
        name = _whole(self._name(client, part, digest))
        size = self._blobs.size(name)
        return None if size is None else Blob(name, digest, size)

    def _lock(self, client: str, part: str) -> Lock:
        return self._locks.setdefault((client, part), Lock())

    def _check_current(self, client: str, part: str, sink: Sink) -> None:
        if self._open.get((client, part)) is not sink:
            raise UploadTakenOver(f"a newer stream of {client} goes on with {part}")

    def _name(self, client: str, part: str, digest: str) -> str:
        """Errors: UpdateRefused, Malformed (bad-digest) unless part and digest can only name a blob of this device."""
        if part not in PARTS:
            raise UpdateRefused(f"{client} named {part[:40]!r}, which is no part of an update")
        check_digest(digest, client)
        return f"{UPLOADS}{client}/{part}.{file_name(digest)}"


def _whole(name: str) -> str:
    return f"{name}{WHOLE}"
