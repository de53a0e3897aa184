"""Storage of a server in memory, for whole federations in one process. It ends with the process."""

from __future__ import annotations

import bisect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from threading import Lock, RLock
from typing import Any, ParamSpec, TypeVar

from attune.common.errors import UploadBusy
from attune.common.wire.blobs import Blob, Buffer, Readable
from attune.common.wire.digest import digest_of
from attune.fedserver.ports.blobs import UPLOADS, Damaged
from attune.fedserver.ports.ledger import AuditEntry, Certificate, Snapshot
from attune.fedserver.stores.audit import entries_in, head_of, next_line
from attune.fedserver.stores.checked_blobs import SEALED, CheckedBlobs, sealed_among, upload_name
from attune.fedserver.stores.sqlite import MemoryDatabase
from attune.fedserver.stores.table_ledger import TableLedger
from attune.fedserver.stores.tables import Tables, certificate_in, snapshot_in

T = TypeVar("T")
LAST = chr(sys.maxunicode)  # sorts behind all other characters
P = ParamSpec("P")


class MemoryStorage:
    """Implements ports.storage.Storage."""

    def __init__(self) -> None:
        self.ledger, self.blobs = MemoryLedger(), MemoryBlobs()
        self.spool = MemorySpool(self.blobs)

    def reader(self) -> MemoryReader:
        return MemoryReader(self.ledger)

    def news(self) -> None:
        """Return None: nothing else can write to this memory."""

    async def close(self) -> None:
        """No-op: memory holds no file."""


class MemoryBlobs(CheckedBlobs):
    """Implements ports.blobs.Blobs: content by digest, and a table of names that hold it."""

    def __init__(self) -> None:
        super().__init__()
        self._digests: dict[str, str] = {}  # name -> digest
        self._sorted: list[str] = []  # the names: those that begin alike are found without a look at the others
        self._content: dict[str, bytes | bytearray] = {}
        self._holders = Counter[str]()  # digest -> number of names
        self._lock = Lock()

    def create(self, name: str, size: int, durable: bool = True) -> _MemoryTarget:
        return _MemoryTarget(self, name, size)

    def put(self, name: str, data: bytes) -> Blob:
        return self.hold(name, data, digest_of(data))

    def hold(self, name: str, data: bytes | bytearray, digest: str) -> Blob:
        """Hold these bytes, which have this digest, by a name."""
        with self._lock:
            before = self._digests.get(name)
            if before is None:
                bisect.insort(self._sorted, name)
            self._holders[digest] += 1
            if digest not in self._content:
                self._content[digest] = data
            self._digests[name] = self._known[name] = digest
            if before is not None:
                self._release(before)
        return Blob(name, digest, len(data))

    def _release(self, digest: str) -> None:
        """Take one name of a content away, for whoever has the lock."""
        self._holders[digest] -= 1
        if not self._holders[digest]:
            del self._holders[digest], self._content[digest]

    def held(self, name: str) -> Blob | None:
        """Return the blob of this name; None: there is none."""
        digest = self._digests.get(name)
        return None if digest is None else Blob(name, digest, len(self._content[digest]))

    def keep(self, blob: Blob, name: str) -> Blob:
        self.sync(blob)
        known = self._known.get(blob.name)
        kept = self.hold(name, self._content[self._digests[blob.name]], self._digests[blob.name])
        if known is None:
            del self._known[name]
        return kept

    def sync(self, blob: Blob) -> None:
        if blob.name not in self._digests:
            raise Damaged(f"{blob.name} is missing", blob.name)

    def get(self, name: str) -> bytes:
        return bytes(self._content[self._digests[name]])

    def names(self, prefix: str) -> list[str]:
        with self._lock:
            first = bisect.bisect_left(self._sorted, prefix)
            return self._sorted[first : bisect.bisect_right(self._sorted, prefix + LAST, first)]

    def remove(self, names: Sequence[str]) -> None:
        with self._lock:
            for name in names:
                if name in self._digests:
                    del self._sorted[bisect.bisect_left(self._sorted, name)]
                    self._release(self._digests.pop(name))
                self._known.pop(name, None)

    def sweep(self) -> None:
        """No-op: what is unfinished has no name."""

    def source(self, name: str) -> Readable:
        return Buffer(name, self._content[self._digests[name]])


class _MemoryTarget:
    def __init__(self, blobs: MemoryBlobs, name: str, size: int) -> None:
        self._blobs, self.name, self._data = blobs, name, bytearray(size)

    def write(self, data: memoryview, offset: int) -> None:
        self._data[offset : offset + len(data)] = data

    def read_into(self, target: memoryview, offset: int) -> None:
        Buffer(self.name, self._data).read_into(target, offset)

    def finish(self, digest: str, size: int) -> Blob:
        return self._blobs.hold(self.name, self._data, digest)

    def abort(self) -> None:
        self._data = bytearray()


class MemorySpool:
    """Implements ports.blobs.Spool."""

    def __init__(self, blobs: MemoryBlobs) -> None:
        self._blobs = blobs
        self._uploads: dict[str, bytearray] = {}  # by name
        self._open: set[str] = set()
        self._lock = Lock()

    def grow(self, sender: str, digest: str, size: int) -> _MemoryUpload:
        name = upload_name(sender, digest)
        with self._lock:
            if name in self._open:
                raise UploadBusy(f"an upload to {name} is open already; close it, then go on")
            self._open.add(name)
            sealed = self._blobs.held(f"{name}{SEALED}")
            if sealed is not None and sealed.size == size:
                data = bytearray(self._blobs.get(sealed.name))
            else:
                if sealed is not None:
                    self._blobs.remove([sealed.name])
                data = self._uploads.get(name, bytearray())
            self._uploads[name] = data = data if len(data) <= size else bytearray()
        return _MemoryUpload(self, self._blobs, name, digest, data)

    def release(self, name: str, keep: bool) -> None:
        """Close an upload, and forget its bytes unless they are to be kept."""
        self._open.discard(name)
        if not keep:
            self._uploads.pop(name, None)

    def offset(self, sender: str, digest: str) -> int:
        sealed = self.sealed(sender, digest)
        return len(self._uploads.get(upload_name(sender, digest), b"")) if sealed is None else sealed.size

    def sealed(self, sender: str, digest: str) -> Blob | None:
        return self._blobs.held(f"{upload_name(sender, digest)}{SEALED}")

    def all_sealed(self) -> list[Blob]:
        names = sealed_among(self._blobs.names(UPLOADS))
        return [Blob(name, digest, len(self._blobs.get(name))) for name, digest in names]

    def keep_only(self, sender: str, digest: str) -> None:
        name, prefix = upload_name(sender, digest), f"{UPLOADS}{sender}."
        if others := [other for other in self._blobs.names(prefix) if other != f"{name}{SEALED}"]:
            self._blobs.remove(others)
        self._uploads = {other: data for other, data in self._uploads.items() if other == name or not other.startswith(prefix)}


class _MemoryUpload:
    def __init__(self, spool: MemorySpool, blobs: MemoryBlobs, name: str, digest: str, data: bytearray) -> None:
        self._spool, self._blobs, self.name = spool, blobs, name
        self._digest, self._data, self._is_open = digest, data, True

    @property
    def size(self) -> int:
        return len(self._data)

    def append(self, data: memoryview) -> None:
        self._data.extend(data)

    def read_into(self, target: memoryview, offset: int) -> None:
        Buffer(self.name, bytes(self._data[offset : offset + len(target)])).read_into(target, 0)

    def seal(self) -> Blob:
        blob = self._blobs.hold(f"{self.name}{SEALED}", bytes(self._data), self._digest)
        self._close(keep=False)
        return blob

    def remove(self) -> None:
        self._blobs.remove([f"{self.name}{SEALED}"])
        self._close(keep=False)

    def close(self) -> None:
        self._close(keep=True)

    def _close(self, keep: bool) -> None:
        if self._is_open:
            self._is_open = False
            self._spool.release(self.name, keep)


class MemoryLedger(TableLedger):
    """Implements ports.ledger.Ledger. Calls are carried out at once: the event loop does nothing else meanwhile."""

    def __init__(self) -> None:
        self.db, self.audit = MemoryDatabase(), list[bytes]()
        self.alone = RLock()  # the reader may be another thread
        self._tables = Tables(self.db)

    def _errors(self) -> AbstractContextManager[Any]:
        return self.alone

    async def _do(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        with self.alone:
            return work(*arguments, **named)

    async def close(self) -> None:
        """No-op: the next simulation over this memory goes on from it."""

    async def note(self, event: str, by: str, **facts: Any) -> None:
        self.audit.append(next_line(self.audit[-1] if self.audit else b"", event, by, facts))
        await self.set_audit_head(head_of(self.audit[-1]))

    async def certificate(self, fingerprint: str) -> Certificate | None:
        return await self._do(certificate_in, self.db, fingerprint)


class MemoryReader:
    """Implements ports.ledger.LedgerReader, for any one thread."""

    def __init__(self, ledger: MemoryLedger) -> None:
        self._ledger = ledger

    def snapshot(self, since: int = 0) -> Snapshot:
        with self._ledger.alone:
            return snapshot_in(self._ledger.db, since)

    def audit(self) -> Iterator[tuple[AuditEntry, str]]:
        return entries_in(list(self._ledger.audit), "the audit log in memory")

    def check(self) -> None:
        """No-op: memory is not checked."""

    def was_served(self) -> bool:
        with self._ledger.alone:
            return self._ledger.db.execute("SELECT 1 FROM certificates WHERE role = 'operator'").fetchone() is not None

    def close(self) -> None:
        """No-op: memory holds no file."""
