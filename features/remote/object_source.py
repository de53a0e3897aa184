"""Objects of S3 as sources of bytes. The server fetches one when its bytes are first read; a worker reads ranges of it.

A source can be sent to a worker. It says there which object it is, and has no keys to the store. Every range is compared with
digests of its chunks, which the server knows of each object that it wrote or compared.
"""

from __future__ import annotations

import contextlib
import errno
from dataclasses import dataclass, field

from attune.common.errors import LedgerBusy
from attune.common.wire.blobs import Blob, Readable
from attune.common.wire.malformed import Truncated
from attune.features.remote.s3_objects import CHUNK_BYTES, ObjectCache, S3Objects, chunks_around, damaged, fits
from attune.fedserver.ports.blobs import Damaged

HEAD_BYTES = CHUNK_BYTES  # of an object that are read for its header alone


@dataclass(frozen=True)
class ObjectPlace:
    """The object that holds a blob.

    Attributes:
        key: Its key.
        name: The blob's name, for errors.
        size: Number of bytes.
        chunks: Digests of its chunks.
    """

    key: str
    name: str
    size: int
    chunks: bytes = field(repr=False)


class ObjectRanges:
    """Ranges of objects. On a worker all sources of a message share one; it has no store until the worker gives it one."""

    def __init__(self, objects: S3Objects | None = None) -> None:
        self.objects = objects

    def __reduce__(self) -> tuple[object, ...]:
        return ObjectRanges, ()

    def read(self, place: ObjectPlace, start: int, end: int) -> memoryview:
        """Return whole chunks of an object, from the boundary `start` to the boundary `end`, compared with their digests.

        Raises:
            Damaged: There is no such object, or it has other bytes.
            LedgerBusy: The store cannot be used now.
        """
        assert self.objects is not None  # noqa: S101 (a worker gives it a store before it reads)
        try:
            data = self._range(self.objects, place, start, end)
        except KeyError:
            raise Damaged(f"{place.name} is missing in {self.objects.url}: restore it from a backup", place.name) from None
        if len(data) != end - start or not fits(data, start, place.chunks):
            raise damaged(place.name, self.objects.url)
        return data

    def _range(self, objects: S3Objects, place: ObjectPlace, start: int, end: int) -> memoryview:
        try:
            return objects.range(place.key, start, end - start)
        except LedgerBusy:
            if objects.size(place.key) == place.size:
                raise
            return memoryview(b"")  # the range is outside of an object of another size


class RangeSource:
    """Object as a source of bytes, on a worker: each reading is a range, but for what the chunk that was read last has."""

    def __init__(self, ranges: ObjectRanges, place: ObjectPlace) -> None:
        self._ranges, self._place, self.name, self.size = ranges, place, place.name, place.size
        self._last: tuple[int, memoryview] = 0, memoryview(b"")

    def __repr__(self) -> str:
        return f"RangeSource({self.name}, {self.size} bytes)"

    def read(self, offset: int, count: int) -> bytes:
        count = min(count, self.size - offset)
        return bytes(self._read(offset, count)) if count > 0 else b""

    def read_into(self, target: memoryview, offset: int) -> None:
        if offset + len(target) > self.size:
            raise Truncated(f"{self.name}: ends {offset + len(target) - self.size} bytes too early")
        target[:] = self._read(offset, len(target))

    def close(self) -> None:
        """No-op: each reading is a call of its own."""

    def _read(self, offset: int, count: int) -> memoryview:
        first, data = self._last
        if not first <= offset <= offset + count <= first + len(data):
            first, end = chunks_around(offset, offset + count, self.size)
            data = self._ranges.read(self._place, first, end)
            last = (len(data) - 1) // CHUNK_BYTES * CHUNK_BYTES
            self._last = first + last, data[last:]
        return data[offset - first : offset - first + count]


class ObjectSource:
    """Object as a source of bytes, in the server. Its header is read as a range, and anything else from a copy in the cache."""

    is_shared = True

    def __init__(self, ranges: ObjectRanges, cache: ObjectCache, key: str, blob: Blob) -> None:
        self.name, self.size = blob.name, blob.size
        self._ranges, self._cache, self._blob = ranges, cache, blob
        self._place = ObjectPlace(key, blob.name, blob.size, cache.chunks(key))
        self._copy: Readable | None = cache.open(key, blob) if cache.has(key) else None
        self._head: memoryview | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"ObjectSource({self.name}, {self.size} bytes)"

    def __reduce__(self) -> tuple[object, ...]:
        return RangeSource, (self._ranges, self._place)

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
            self._head = self._ranges.read(self._place, 0, min(HEAD_BYTES, self.size))
        return self._head

    def _whole(self) -> Readable:
        if self._copy is None:
            if self._closed:
                raise OSError(errno.EBADF, "Bad file: closed", self.name)
            with contextlib.suppress(KeyError):
                self._copy = self._cache.open(self._place.key, self._blob)
        if self._copy is None:
            raise Damaged(f"{self.name} is missing: restore it from a backup", self.name)
        return self._copy
