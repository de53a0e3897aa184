"""Blobs on their way in: one resumable file a device and part. A newer stream takes the file over from an older one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.errors import UnknownBlob, UpdateRefused
from common.wire.blobs import Blob, check_digest
from common.wire.sinks import FileSink

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
    """Not thread-safe: opened and taken over on the event loop; a sink's writes happen where its owner says."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[tuple[str, str], FileSink] = {}

    def sink(self, client: str, target: Target, max_bytes: int) -> FileSink:
        """The file to append to, at its present length. Whoever held it before is cut off, and other digests of the part go.

        Errors: LimitExceeded, DiskFull, UpdateRefused for a part or digest that is none.
        """
        path = self._path(client, target.part, target.digest)
        self.release(client, target.part)
        for other in path.parent.glob(f"{target.part}.*"):
            if other not in (path, self._complete(path)):
                other.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        if self._complete(path).exists():  # uploaded, but never submitted: the device goes on at its end
            self._complete(path).rename(path)
        sink = FileSink(path, target.size, target.digest, max_bytes=max_bytes, who=client)
        self._open[client, target.part] = sink
        return sink

    def offset(self, client: str, target: Target) -> int:
        """How many bytes of the target are here."""
        path = self._path(client, target.part, target.digest)
        for candidate in (self._complete(path), path):
            if candidate.exists():
                return candidate.stat().st_size
        return 0

    def complete(self, client: str, target: Target, sink: FileSink) -> None:
        """Checks the digest and makes the blob durable; only then can an update name it."""
        blob = sink.finish(durable=True)
        blob.path.rename(self._complete(blob.path))
        self._open.pop((client, target.part), None)

    def take(self, client: str, part: str, digest: str) -> Blob:
        """The complete blob that an update names. Errors: UnknownBlob if it is not (or no longer) here."""
        path = self._complete(self._path(client, part, digest))
        if not path.is_file():
            raise UnknownBlob(f"{client}'s update names {part} {digest[:12]}, which is not here: upload it, then submit again")
        return Blob(path, digest, path.stat().st_size)

    def release(self, client: str, part: str) -> None:
        """Cuts off whoever writes this part, so that two streams never write one file."""
        sink = self._open.pop((client, part), None)
        if sink is not None:
            sink.close()

    def release_all(self, client: str) -> None:
        """Cuts off every stream of a device."""
        for name, part in list(self._open):
            if name == client:
                self.release(name, part)

    def is_current(self, client: str, part: str, sink: FileSink) -> bool:
        return self._open.get((client, part)) is sink

    def _path(self, client: str, part: str, digest: str) -> Path:
        """Errors: UpdateRefused, BadDigest unless part and digest are words that cannot lead outside the folder."""
        if part not in PARTS:
            raise UpdateRefused(f"{client} named {part[:40]!r}, which is no part of an update")
        check_digest(digest, client)
        return self._folder / client / f"{part}.{digest}"

    @staticmethod
    def _complete(path: Path) -> Path:
        return path.with_name(path.name + ".complete")
