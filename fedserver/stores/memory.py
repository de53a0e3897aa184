"""Storage in memory, for tests and for whole federations in one process. It ends with the process."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path
from threading import Lock

from attune.common.errors import UploadBusy
from attune.common.wire.blobs import Blob, Buffer, Readable
from attune.common.wire.digest import digest_of
from attune.common.wire.malformed import Truncated
from attune.fedserver.ports.blobs import Damaged
from attune.fedserver.stores.memory_ledger import MemoryLedger, MemoryReader
from attune.fedserver.stores.trust import Trust


class MemoryStorage:
    """Implements ports.storage.Storage."""

    def __init__(self) -> None:
        self.ledger, self.blobs = MemoryLedger(), MemoryBlobs()

    def __repr__(self) -> str:
        return f"MemoryStorage({self.ledger!r})"

    def reader(self) -> MemoryReader:
        return self.ledger.reader()

    async def close(self) -> None:
        """No-op: memory holds no file."""


class Shelf(MutableMapping[str, bytes | bytearray]):
    """Bytes by name. Those that begin alike are found without a look at the others. Several threads may use it."""

    def __init__(self) -> None:
        self._bytes: dict[str, bytes | bytearray] = {}
        self._sorted: list[str] = []
        self._lock = Lock()

    def __getitem__(self, name: str) -> bytes | bytearray:
        return self._bytes[name]

    def __setitem__(self, name: str, data: bytes | bytearray) -> None:
        with self._lock:
            if name not in self._bytes:
                bisect.insort(self._sorted, name)
            self._bytes[name] = data

    def __delitem__(self, name: str) -> None:
        with self._lock:
            del self._bytes[name]
            del self._sorted[bisect.bisect_left(self._sorted, name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sorted)

    def __len__(self) -> int:
        return len(self._bytes)

    def __contains__(self, name: object) -> bool:
        return name in self._bytes

    def names(self, prefix: str) -> list[str]:
        """All that begin so, sorted."""
        with self._lock:
            found = itertools.islice(self._sorted, bisect.bisect_left(self._sorted, prefix), None)
            return list(itertools.takewhile(lambda name: name.startswith(prefix), found))


class MemoryBlobs(Trust):
    """Implements fedserver.ports.blobs.Blobs."""

    def __init__(self) -> None:
        super().__init__()
        self._data = Shelf()
        self._growing: set[str] = set()
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"MemoryBlobs({len(self._data)} blobs)"

    def create(self, name: str, size: int, durable: bool = True) -> _Target:
        return _Target(self, name, size)

    def put(self, name: str, data: bytes) -> Blob:
        return self.keep(name, data, digest_of(data))

    def keep(self, name: str, data: bytes | bytearray, digest: str) -> Blob:
        """These bytes, whose digest is known."""
        self._known[name] = digest
        self._data[name] = data
        return Blob(name, digest, len(data))

    def grow(self, name: str, size: int) -> _Growing:
        with self._lock:
            if name in self._growing:
                raise UploadBusy(f"an upload to {name} is open already; close it, then go on")
            self._growing.add(name)
            there = self._data.get(name, b"")
            self._data[name] = bytearray(there) if len(there) <= size else bytearray()
        return _Growing(self, name)

    def grown(self, name: str) -> bytearray:
        """The bytes of what is growing under this name."""
        data = self._data[name]
        assert isinstance(data, bytearray)  # noqa: S101 (`grow` made it)
        return data

    def release(self, name: str) -> None:
        """What grows under this name is let go of."""
        self._growing.discard(name)

    def get(self, name: str) -> bytes:
        return bytes(self._data[name])

    def size(self, name: str) -> int | None:
        return len(self._data[name]) if name in self._data else None

    def names(self, prefix: str) -> list[str]:
        return self._data.names(prefix)

    def move(self, blob: Blob, name: str) -> Blob:
        if blob.name not in self._data:
            raise Damaged(f"{blob.name} is missing", blob.name)
        data = self._data.pop(blob.name)
        self._data[name] = data
        known = self._known.pop(blob.name, None)
        if known is not None:
            self._known[name] = known
        return Blob(name, blob.digest, blob.size)

    def sync(self, blob: Blob) -> None:
        if blob.name not in self._data:
            raise Damaged(f"{blob.name} is missing", blob.name)

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self._data.pop(name, None)
            self._known.pop(name, None)

    def path(self, blob: Blob) -> Path | None:
        return None

    def sweep(self) -> None:
        """Nothing: what is unfinished has no name."""

    def _source(self, name: str) -> Readable:
        return Buffer(name, self._data[name])


class _Target:
    def __init__(self, blobs: MemoryBlobs, name: str, size: int) -> None:
        self._blobs, self.name, self._data = blobs, name, bytearray(size)

    def write(self, data: memoryview, offset: int) -> None:
        self._data[offset : offset + len(data)] = data

    def read_into(self, target: memoryview, offset: int) -> None:
        Buffer(self.name, self._data).read_into(target, offset)

    def finish(self, digest: str, size: int) -> Blob:
        return self._blobs.keep(self.name, self._data, digest)

    def abort(self) -> None:
        self._data = bytearray()


class _Growing:
    def __init__(self, blobs: MemoryBlobs, name: str) -> None:
        self._blobs, self.name, self._open = blobs, name, True

    @property
    def size(self) -> int:
        return len(self._blobs.grown(self.name))

    def append(self, data: memoryview) -> None:
        self._blobs.grown(self.name).extend(data)

    def read_into(self, target: memoryview, offset: int) -> None:
        piece = self._blobs.grown(self.name)[offset : offset + len(target)]
        if len(piece) < len(target):
            raise Truncated(f"{self.name}: ends {len(target) - len(piece)} bytes too early")
        target[:] = piece

    def seal(self, name: str, digest: str) -> Blob:
        data = bytes(self._blobs.grown(self.name))
        self.remove()
        return self._blobs.keep(name, data, digest)

    def remove(self) -> None:
        self._blobs.remove([self.name])
        self.close()

    def close(self) -> None:
        if self._open:
            self._open = False
            self._blobs.release(self.name)
