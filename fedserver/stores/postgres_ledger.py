"""The ledger in PostgreSQL, with the audit log in a table, and its reader for views."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from itertools import islice
from typing import Any

import msgspec

from attune.common.errors import HomeMismatch
from attune.fedserver.ports.ledger import AuditEntry, Certificate, Snapshot
from attune.fedserver.stores.audit import entries_in, head_of, next_line
from attune.fedserver.stores.postgres import PostgresDatabase
from attune.fedserver.stores.table_ledger import TableLedger
from attune.fedserver.stores.tables import Tables, certificate_in, snapshot_in


class PostgresLedger(TableLedger):
    """Implements ports.ledger.Ledger: calls are carried out one after the other, but for the question about a certificate."""

    def __init__(self, db: PostgresDatabase) -> None:
        super().__init__(Tables(db))
        self._db = db

    def _errors(self) -> AbstractContextManager[None]:
        return nullcontext()  # the database itself does this

    async def note(self, event: str, by: str, **facts: Any) -> None:
        await self._do(self._append, event, by, facts)

    def _append(self, event: str, by: str, facts: dict[str, Any]) -> None:
        with self._db.transaction():
            row = self._db.execute("SELECT line FROM audit ORDER BY number DESC LIMIT 1").fetchone()
            line = next_line(row[0] if row else b"", event, by, facts)
            head = head_of(line)
            self._db.execute("INSERT INTO audit (number, line) VALUES (?, ?)", (head.number, line))
            self._tables.set_audit_head(head)

    async def certificate(self, fingerprint: str) -> Certificate | None:
        return await asyncio.to_thread(certificate_in, self._db, fingerprint)


class PostgresReader:
    """Implements ports.ledger.LedgerReader, over one connection of its own."""

    def __init__(self, url: str) -> None:
        self._url = url

    @cached_property
    def _db(self) -> PostgresDatabase:
        db = PostgresDatabase(self._url)
        db.prepare()
        return db

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (UnicodeError, msgspec.MsgspecError) as error:
            raise _damage(self._url, str(error)) from None

    def snapshot(self, since: int = 0) -> Snapshot:
        with self._errors(), self._db.moment():
            return snapshot_in(self._db, since)

    def audit(self) -> Iterator[tuple[AuditEntry, str]]:
        lines = [bytes(row[0]) for row in self._db.execute("SELECT line FROM audit ORDER BY number")]
        return entries_in(lines, f"the audit log in {self._url}")

    def check(self) -> None:
        if changed := list(islice(self._db.changed(), 3)):
            raise _damage(self._url, "; ".join(changed))
        self.snapshot()

    def was_served(self) -> bool:
        return self._db.execute("SELECT 1 FROM certificates WHERE role = 'operator'").fetchone() is not None

    def close(self) -> None:
        if "_db" in self.__dict__:
            self._db.close()


def _damage(url: str, what: str) -> HomeMismatch:
    return HomeMismatch(f"the database {url} is damaged ({' '.join(what.split())}): restore it from a backup of PostgreSQL")
