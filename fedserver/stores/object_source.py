"""Objects of S3 as sources of bytes. The server fetches one when its bytes are first read; a worker reads ranges of it.

A source can be sent to a worker. It says there which object it is, and has no keys to the store.
"""

from __future__ import annotations

import contextlib
import errno

from attune.common.wire.blobs import Blob, Readable
from attune.common.wire.malformed import Truncated
from attune.fedserver.ports.blobs import Damaged
from attune.fedserver.stores.object_cache import ObjectCache
from attune.fedserver.stores.s3_objects import S3Objects

HEAD_BYTES = 1 << 16  # of an object that are read for its header alone


class ObjectRanges:
    """Ranges of objects. On a worker all sources of a message share one; it has no store until the worker gives it one."""

    def __init__(self, objects: S3Objects | None = None) -> None:
        self.objects = objects

    def __reduce__(self) -> tuple[object, ...]:
        return ObjectRanges, ()

    def read(self, key: str, start: int, length: int, name: str) -> memoryview:
        """Return bytes of an object.

        Raises:
            Damaged: There is no such object.
            LedgerBusy: The store cannot be used now.
        """
        assert self.objects is not None  # noqa: S101 (a worker gives it a store before it reads)
        try:
            return self.objects.range(key, start, length)
        except KeyError:
            raise Damaged(f"{name} is missing in {self.objects.url}: restore it from a backup", name) from None


class RangeSource:
    """Object as a source of bytes, on a worker: each reading is a range."""

    def __init__(self, ranges: ObjectRanges, key: str, name: str, size: int) -> None:
        self._ranges, self._key, self.name, self.size = ranges, key, name, size

    def __repr__(self) -> str:
        return f"RangeSource({self.name}, {self.size} bytes)"

    def read(self, offset: int, count: int) -> bytes:
        count = min(count, self.size - offset)
        return bytes(self._ranges.read(self._key, offset, count, self.name)) if count > 0 else b""

    def read_into(self, target: memoryview, offset: int) -> None:
        data = self._ranges.read(self._key, offset, len(target), self.name)
        if len(data) < len(target):
            raise Truncated(f"{self.name}: ends {len(target) - len(data)} bytes too early")
        target[:] = data

    def close(self) -> None:
        """No-op: each reading is a call of its own."""


class ObjectSource:
    """Object as a source of bytes, in the server. Its header is read as a range, and anything else from a copy in the cache."""

    is_shared = True

    def __init__(self, ranges: ObjectRanges, cache: ObjectCache, key: str, blob: Blob) -> None:
        self.name, self.size = blob.name, blob.size
        self._ranges, self._cache, self._key, self._blob = ranges, cache, key, blob
        self._copy: Readable | None = cache.open(key, blob) if cache.has(key) else None
        self._head: memoryview | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"ObjectSource({self.name}, {self.size} bytes)"

    def __reduce__(self) -> tuple[object, ...]:
        return RangeSource, (self._ranges, self._key, self.name, self.size)

    def read(self, offset: int, count: int) -> bytes:
        if self._copy is None and offset + count <= min(HEAD_BYTES, self.size):
            return bytes(self._begins()[offset : offset + count])
        return self._whole().read(offset, count)

    def read_into(self, target: memoryview, offset: int) -> None:
        if self._copy is None and offset + len(target) <= min(HEAD_BYTES, self.size):
            target[:] = self._begins()[offset : offset + len(target)]
        else:
            self._whole().read_into(target, offset)

    def close(self) -> None:
        self._closed = True
        if self._copy is not None:
            self._copy.close()

    def _begins(self) -> memoryview:
        """Return the first bytes, which have the header."""
        if self._closed:
            raise OSError(errno.EBADF, "Bad file: closed", self.name)
        if self._head is None:
            self._head = self._ranges.read(self._key, 0, min(HEAD_BYTES, self.size), self.name)
        return self._head

    def _whole(self) -> Readable:
        if self._copy is None:
            if self._closed:
                raise OSError(errno.EBADF, "Bad file: closed", self.name)
            with contextlib.suppress(KeyError):
                self._copy = self._cache.open(self._key, self._blob)
        if self._copy is None:
            raise Damaged(f"{self.name} is missing: restore it from a backup", self.name)
        return self._copy
