"""Blobs on their way in: one resumable file a device and part. A newer stream takes the file over from an older one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from attune.common.errors import UnknownBlob, UpdateRefused, UploadTakenOver
from attune.common.wire.blobs import Blob
from attune.common.wire.digest import check_digest, file_name
from attune.fedserver.stores.upload_file import FileSink

PARTS = ("shared", "attended", "generated")


@dataclass(frozen=True)
class Target:
    """What a device says it will send: `size` bytes with SHA-256 `digest`, as one part of the answer to `order`."""

    order: str
    part: str
    digest: str
    size: int
    offset: int = 0


class Uploads:
    """Called from several disk threads. Each device's part has a lock, so that a take-over never meets a write half-way,
    which would go on into a file descriptor that is closed, or by then another file's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[tuple[str, str], FileSink] = {}
        self._locks: dict[tuple[str, str], Lock] = {}

    def sink(self, client: str, target: Target, max_bytes: int) -> FileSink:
        """The file to append to, at its present length. Whoever held it before is cut off, and other digests of the part go.

        Errors: LimitExceeded, DiskFull, UpdateRefused for a part or digest that is none.
        """
        path = self._path(client, target.part, target.digest)
        with self._lock(client, target.part):
            older = self._open.pop((client, target.part), None)
            if older is not None:
                older.close()
            for other in path.parent.glob(f"{target.part}.*"):
                if other not in (path, self._complete(path)):
                    other.unlink(missing_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            if self._complete(path).exists():  # uploaded, but never submitted: the device goes on at its end
                self._complete(path).rename(path)
            sink = FileSink(path, target.size, target.digest, max_bytes=max_bytes, who=client)
            self._open[client, target.part] = sink
        return sink

    def write(self, client: str, part: str, sink: FileSink, frames: Sequence[bytes]) -> None:
        """The next frames. Errors: UploadTakenOver if a newer stream has taken the upload over, LimitExceeded, DiskFull."""
        with self._lock(client, part):
            self._check_current(client, part, sink)
            sink.write(frames)

    def offset(self, client: str, target: Target) -> int:
        """How many bytes of the target are here."""
        path = self._path(client, target.part, target.digest)
        for candidate in (self._complete(path), path):
            if candidate.exists():
                return candidate.stat().st_size
        return 0

    def complete(self, client: str, part: str, sink: FileSink) -> None:
        """Checks the digest and makes the blob durable; only then can an update name it.

        Errors: UploadTakenOver as for `write`, Truncated, DigestMismatch, DiskFull.
        """
        with self._lock(client, part):
            self._check_current(client, part, sink)
            blob = sink.finish(durable=True)
            blob.path.rename(self._complete(blob.path))
            del self._open[client, part]

    def take(self, client: str, part: str, digest: str) -> Blob:
        """The complete blob that an update names. Errors: UnknownBlob if it is not (or no longer) here."""
        path = self._complete(self._path(client, part, digest))
        if not path.is_file():
            raise UnknownBlob(f"{client}'s update names {part} {digest[:19]}, which is not here: upload it, then submit again")
        return Blob(path, digest, path.stat().st_size)

    def _lock(self, client: str, part: str) -> Lock:
        return self._locks.setdefault((client, part), Lock())

    def _check_current(self, client: str, part: str, sink: FileSink) -> None:
        if self._open.get((client, part)) is not sink:
            raise UploadTakenOver(f"a newer stream of {client} goes on with {part}")

    def _path(self, client: str, part: str, digest: str) -> Path:
        """Errors: UpdateRefused, Malformed (bad-digest) unless part and digest can only name a file in the folder."""
        if part not in PARTS:
            raise UpdateRefused(f"{client} named {part[:40]!r}, which is no part of an update")
        check_digest(digest, client)
        return self._folder / client / f"{part}.{file_name(digest)}"

    @staticmethod
    def _complete(path: Path) -> Path:
        return path.with_name(path.name + ".complete")
