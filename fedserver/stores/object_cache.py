"""Copies of objects on the server's disk, within a bound."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from attune.common.durable import disk_errors, sweep_files
from attune.common.wire.blobs import Blob, LocalFile, LocalTarget, Readable
from attune.fedserver.ports.blobs import Damaged
from attune.fedserver.stores.checked_blobs import OBJECTS
from attune.fedserver.stores.chunk_digests import digests_in
from attune.fedserver.stores.s3_objects import S3Objects


class ObjectCache:
    """Copies of objects in a folder. With a bound, the least recently used go when there are more bytes."""

    def __init__(self, folder: Path, objects: S3Objects) -> None:
        self._folder, self._objects, self._bound = folder, objects, math.inf
        self._chunks: dict[str, bytes] = {}  # of each object that this process wrote or compared, the digests of its chunks

    def fill(self, size: int) -> LocalTarget:
        """Return a file of `size` bytes to be written, which `take` makes the copy of an object."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return LocalTarget(self._folder / f".{secrets.token_hex(8)}.new", size)

    def take(self, path: Path, key: str, chunks: bytes) -> None:
        """Make a file of this folder the copy of an object, whose chunks have these digests."""
        with disk_errors(path):
            path.replace(self._path(key))
        self._chunks[key] = chunks
        self._bound_bytes()

    def learn(self, key: str, chunks: bytes) -> None:
        """Note the digests of the chunks of an object of which there is no copy."""
        self._chunks[key] = chunks

    def knows(self, key: str) -> bool:
        """Return whether this process has written or compared an object."""
        return key in self._chunks

    def chunks(self, key: str) -> bytes:
        """Return the digests of the chunks of an object.

        Raises:
            KeyError: This process has neither written nor compared it.
        """
        return self._chunks[key]

    def has(self, key: str) -> bool:
        """Return whether there is a copy that was compared with the digest."""
        return key in self._chunks and self._path(key).is_file()

    def open(self, key: str, blob: Blob) -> Readable:
        """Open the copy of an object, which is fetched if there is none that is whole.

        Raises:
            KeyError: There is no such object.
            Damaged: The object has other bytes.
            LedgerBusy: The store cannot be used now.
        """
        with contextlib.suppress(FileNotFoundError):
            os.utime(self._path(key))
            source = LocalFile(self._path(key), blob.name)
            if key in self._chunks:
                return source
            digest, chunks = digests_in(source)
            if digest == blob.digest:
                self._chunks[key] = chunks
                return source
            source.close()
        return self._fetched(key, blob)

    def _fetched(self, key: str, blob: Blob) -> Readable:
        target, size = self.fill(blob.size), 0
        try:
            for piece in self._objects.pieces(key):
                if size + len(piece) > blob.size:
                    raise damaged(blob.name, self._objects.url)
                target.write(piece, size)
                size += len(piece)
            source = LocalFile(target.path, blob.name)
            digest, chunks = digests_in(source)
            if digest != blob.digest:
                source.close()
                raise damaged(blob.name, self._objects.url)
        except BaseException:
            target.abort()
            raise
        target.finish(blob.digest, size)
        self.take(target.path, key, chunks)
        return source

    def drop(self, keys: Iterable[str]) -> None:
        """Remove copies. Whoever has one open goes on reading."""
        for key in keys:
            self._path(key).unlink(missing_ok=True)

    def forget(self, keys: Iterable[str]) -> None:
        """Remove copies of objects that go, and what is known of them."""
        for key in keys:
            self._chunks.pop(key, None)
            self._path(key).unlink(missing_ok=True)

    def bound(self, most_bytes: int) -> None:
        """Keep at most so many bytes from now on."""
        self._bound = most_bytes
        if self._folder.is_dir():
            self._bound_bytes()

    def sweep(self) -> None:
        """Remove what a killed process left unfinished."""
        if self._folder.is_dir():
            sweep_files(self._folder)

    def _path(self, key: str) -> Path:
        return self._folder / key.removeprefix(OBJECTS)

    def _bound_bytes(self) -> None:
        copies = []
        with os.scandir(self._folder) as paths:
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    copies.append((path.stat().st_mtime, path.stat().st_size, path.name))
        total = sum(size for _, size, _ in copies)
        for _, size, name in sorted(copies):
            if total <= self._bound:
                return
            if not name.startswith("."):
                self.drop([name])
                total -= size


def damaged(name: str, url: str) -> Damaged:
    """Return the error for a blob whose object has other bytes."""
    return Damaged(f"{name} is damaged in {url}, its bytes are not those that were written: restore it from a backup", name)
