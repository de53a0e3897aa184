"""Blobs in an S3 store, with their names in PostgreSQL and a cache on the server's disk.

An object is written once, under the digest of its bytes and a random end, and never changed. A row of the table `names` makes
it a blob. So a name counts only when the bytes are in S3, and a server that was replaced can harm no object of its successor.
What belongs to one process or one machine stays in the home's folder: uploads, what is served, the noise secret.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from attune.common.errors import HomeMismatch, LedgerBusy, SettingError
from attune.common.wire.blobs import Blob, LocalTarget, Readable, Target
from attune.common.wire.digest import digest_of
from attune.features.remote.postgres import PostgresDatabase
from attune.features.remote.s3_objects import ObjectCache, S3Objects
from attune.fedserver.ports.blobs import INBOX, NOISE_SECRET, REDO, SERVED, STATE, UPLOADS, Damaged
from attune.fedserver.stores.checked_blobs import OBJECTS, CheckedBlobs, new_key
from attune.fedserver.stores.folder import FolderBlobs

LOG = logging.getLogger("fedserver")
T = TypeVar("T")
IN_S3 = (STATE, INBOX)  # what the names of blobs begin with whose bytes are in S3
HERE = (UPLOADS, SERVED, REDO, NOISE_SECRET)
OWNER = "owner"
REPLACED_NAME = (
    "INSERT INTO names (name, digest, size, object) VALUES (?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
    "digest = excluded.digest, size = excluded.size, object = excluded.object"
)


def check_url(url: str) -> None:
    """Check the URL of blobs.

    Raises:
        SettingError: It is none, or has a secret.
    """
    bucket, _, _ = url.removeprefix("s3://").partition("/")
    if not url.startswith("s3://") or not bucket or "@" in url or "?" in url:
        raise SettingError("--blobs needs a URL such as s3://BUCKET/PREFIX; keys come from the variables AWS_...")


class S3Blobs(CheckedBlobs):
    """Implements ports.blobs.Blobs."""

    def __init__(self, local: FolderBlobs, db: PostgresDatabase, objects: S3Objects, cache: ObjectCache) -> None:
        super().__init__()
        self._local, self._db, self._objects, self._cache = local, db, objects, cache
        self._leaving: set[str] = set()  # names that go as soon as the database is there

    def create(self, name: str, size: int, durable: bool = True) -> Target:
        return _S3Target(self, name, self._cache.fill(size)) if _is_in_s3(name) else self._local.create(name, size, durable)

    def put(self, name: str, data: bytes) -> Blob:
        if not _is_in_s3(name):
            return self._local.put(name, data)
        target = self.create(name, len(data))
        try:
            target.write(memoryview(data), 0)
            return target.finish(digest_of(data), len(data))
        finally:
            target.abort()

    def upload(self, blob: Blob, path: Path) -> Blob:
        """Write a file of the cache's folder to S3, and then give it its name."""
        key = new_key(blob.digest)
        self._objects.write(key, path)
        self._cache.take(path, key)
        self._give(blob, key)
        self._known[blob.name] = blob.digest
        return blob

    def keep(self, blob: Blob, name: str) -> Blob:
        kept = Blob(name, blob.digest, blob.size)
        if _is_in_s3(blob.name):
            held = self._found(blob.name)
            if held is None:
                raise Damaged(f"{blob.name} is missing", blob.name)
            self._give(kept, held[0])
        else:
            self._local.check(blob)
            copy = self._cache.fill(0)
            copy.abort()
            os.link(self._local.local(blob.name), copy.path)
            try:
                self.upload(kept, copy.path)
            finally:
                copy.path.unlink(missing_ok=True)
        return kept

    def sync(self, blob: Blob) -> None:
        if not _is_in_s3(blob.name):
            self._local.sync(blob)
        elif self._found(blob.name) is None:
            raise Damaged(f"{blob.name} is missing", blob.name)

    def open(self, blob: Blob) -> Readable:
        return super().open(blob) if _is_in_s3(blob.name) else self._local.open(blob)

    def check(self, blob: Blob) -> None:
        if not _is_in_s3(blob.name):
            self._local.check(blob)
            return
        if (held := self._found(blob.name)) is not None:
            self._cache.drop([held[0]])  # the bytes in S3 count
        super().check(blob)

    def get(self, name: str) -> bytes:
        if not _is_in_s3(name):
            return self._local.get(name)
        try:
            source = self.source(name)
        except Damaged:
            raise KeyError(name) from None
        with contextlib.closing(source):
            return source.read(0, source.size)

    def names(self, prefix: str) -> list[str]:
        self._leave()
        rows = self._db.execute("SELECT name FROM names WHERE name >= ? AND name < ?", (prefix, prefix + chr(0x10FFFF)))
        local = [] if _is_in_s3(prefix) else [name for name in self._local.names(prefix) if name.startswith(HERE)]
        return sorted([*local, *(row[0] for row in rows)])

    def remove(self, names: Sequence[str]) -> None:
        self._local.remove([name for name in names if not _is_in_s3(name)])
        in_s3 = [name for name in names if _is_in_s3(name)]
        for name in in_s3:
            self._known.pop(name, None)
        self._leaving.update(in_s3)
        try:
            self._leave()
        except LedgerBusy as error:
            LOG.warning("%s; %d blobs are removed later", error, len(in_s3))

    def _leave(self) -> None:
        """Remove what `remove` was asked for, also while the database was lost."""
        leaving = list(self._leaving)
        if leaving:
            asked = msgspec.json.encode(leaving).decode()
            with self._db.transaction():
                statement = f"DELETE FROM names WHERE name IN ({self._db.strings}) RETURNING object"  # noqa: S608
                gone = self._unnamed({row[0] for row in self._db.execute(statement, (asked,))})
            self._leaving.difference_update(leaving)
            self._drop(gone)

    def sweep(self) -> None:
        """Remove what a killed process left unfinished, here and in S3: objects that no name holds."""
        self._local.sweep()
        self._cache.sweep()
        self._drop(self._unnamed(set(self._objects.keys(OBJECTS))))

    def claim(self, federation: str) -> None:
        """Check that the prefix belongs to this federation; a new one is made its own.

        Raises:
            HomeMismatch: It belongs to another federation, whose blobs must not be swept.
        """
        mine = federation.encode()
        if not self._objects.write(OWNER, mine) and self._objects.read(OWNER) != mine:
            raise HomeMismatch(f"{self._objects.url} holds the blobs of another federation: choose another prefix (--blobs)")

    def source(self, name: str) -> Readable:
        if not _is_in_s3(name):
            return self._local.source(name)
        held = self._found(name)
        if held is None:
            raise KeyError(name)
        source = self._cache.open(held[0], held[1])
        self._known[name] = held[1].digest
        return source

    def _found(self, name: str) -> tuple[str, Blob] | None:
        """Return the object that a name holds, and what is in it."""
        self._leave()
        row = self._db.execute("SELECT object, digest, size FROM names WHERE name = ?", (name,)).fetchone()
        return (row[0], Blob(name, row[1], row[2])) if row else None

    def _give(self, blob: Blob, key: str) -> None:
        self._leave()
        with self._db.transaction():
            before = self._db.execute("SELECT object FROM names WHERE name = ?", (blob.name,)).fetchone()
            self._db.execute(REPLACED_NAME, (blob.name, blob.digest, blob.size, key))
            gone = self._unnamed({before[0]}) if before else []
        self._known.pop(blob.name, None)
        self._drop(gone)

    def _unnamed(self, keys: set[str]) -> list[str]:
        """Return those of some objects that no name holds."""
        asked = msgspec.json.encode(sorted(keys)).decode()
        rows = self._db.execute(f"SELECT object FROM names WHERE object IN ({self._db.strings})", (asked,))  # noqa: S608
        return sorted(keys - {row[0] for row in rows})

    def _drop(self, keys: Sequence[str]) -> None:
        """Remove objects that no name holds. Those that S3 does not remove now go at the next start."""
        self._cache.drop(keys)
        try:
            self._objects.remove(keys)
        except LedgerBusy as error:
            LOG.warning("%s; %d objects without a name stay until the next start", error, len(keys))


class _S3Target:
    """A file of the cache's folder that goes to S3 when it is finished."""

    def __init__(self, blobs: S3Blobs, name: str, file: LocalTarget) -> None:
        self._blobs, self.name, self._file = blobs, name, file

    def write(self, data: memoryview, offset: int) -> None:
        self._file.write(data, offset)

    def read_into(self, target: memoryview, offset: int) -> None:
        self._file.read_into(target, offset)

    def finish(self, digest: str, size: int) -> Blob:
        self._file.finish(digest, size)
        try:
            return self._blobs.upload(Blob(self.name, digest, size), self._file.path)
        finally:
            self._file.path.unlink(missing_ok=True)

    def abort(self) -> None:
        self._file.abort()


def _is_in_s3(name: str) -> bool:
    return name.startswith(IN_S3)
