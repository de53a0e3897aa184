"""Copies of objects on the server's disk, within a bound."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from attune.common.durable import disk_errors, sweep_files
from attune.common.wire.blobs import Blob, LocalFile, LocalTarget, Readable, digest_in
from attune.fedserver.ports.blobs import Damaged
from attune.fedserver.stores.checked_blobs import OBJECTS
from attune.fedserver.stores.s3_objects import S3Objects


class ObjectCache:
    """Copies of objects in a folder. With a bound, the least recently used go when there are more bytes."""

    def __init__(self, folder: Path, objects: S3Objects) -> None:
        self._folder, self._objects, self._bound = folder, objects, math.inf
        self._whole: set[str] = set()  # objects whose copy this process has compared with the digest

    def fill(self, size: int) -> LocalTarget:
        """Return a file of `size` bytes to be written, which `take` makes the copy of an object."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return LocalTarget(self._folder / f".{secrets.token_hex(8)}.new", size)

    def take(self, path: Path, key: str) -> None:
        """Make a file of this folder the copy of an object."""
        with disk_errors(path):
            path.replace(self._path(key))
        self._whole.add(key)
        self._bound_bytes()

    def has(self, key: str) -> bool:
        """Return whether there is a copy that was compared with the digest."""
        return key in self._whole and self._path(key).is_file()

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
            if key in self._whole or (source.size == blob.size and digest_in(source) == blob.digest):
                self._whole.add(key)
                return source
            source.close()
        return self._fetched(key, blob)

    def _fetched(self, key: str, blob: Blob) -> Readable:
        target, size = self.fill(blob.size), 0
        try:
            for piece in self._objects.pieces(key):
                target.write(piece, size)
                size += len(piece)
            source = LocalFile(target.path, blob.name)
            if size != blob.size or digest_in(source) != blob.digest:
                source.close()
                raise Damaged(
                    f"{blob.name} is damaged in {self._objects.url}, its bytes are not those that were written: restore it from"
                    " a backup",
                    blob.name,
                )
        except BaseException:
            target.abort()
            raise
        target.finish(blob.digest, size)
        self.take(target.path, key)
        return source

    def drop(self, keys: Sequence[str]) -> None:
        """Remove copies. Whoever has one open goes on reading."""
        for key in keys:
            self._whole.discard(key)
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
