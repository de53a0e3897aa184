"""A ledger in memory, for federations in one process and for tests: the tables of SQLite, without file and thread."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import RLock
from typing import Any, ParamSpec, TypeVar

from attune.fedserver.ports.ledger import AuditEntry, Certificate, Snapshot
from attune.fedserver.stores.audit import entries_in, head_of, next_line
from attune.fedserver.stores.migrations import SCHEMA
from attune.fedserver.stores.sqlite import SqliteDatabase
from attune.fedserver.stores.table_ledger import TableLedger
from attune.fedserver.stores.tables import Tables, certificate_in, snapshot_in

T = TypeVar("T")
P = ParamSpec("P")


class MemoryDatabase(SqliteDatabase):
    """Tables in memory, where nothing needs to be synced. Digests of rows are for files."""

    def __init__(self) -> None:
        super().__init__(sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False))
        self.connection.executescript(f"PRAGMA temp_store = MEMORY; {SCHEMA}")  # large sorts write no file either

    @contextmanager
    def synced(self) -> Iterator[None]:
        yield


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
