"""The ledger in one SQLite file with the audit log beside it, and its reader for views.

Every call of a peer asks for its certificate. That is read through a connection of its own, because a reader needs no lock in
SQLite's WAL mode: the answer does not queue behind a commit that is being synced.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from typing_extensions import Self

from attune.common.errors import LedgerBusy
from attune.fedserver.ports.ledger import AuditEntry, Certificate, Snapshot
from attune.fedserver.stores import row_digests
from attune.fedserver.stores.audit import Audit, entries
from attune.fedserver.stores.migrations import VERSION, check_schema, damage, migrate, version_of
from attune.fedserver.stores.table_ledger import TableLedger
from attune.fedserver.stores.tables import Rows, Tables, certificate_in, snapshot_in

AUDIT_FILE = "audit.jsonl"
BUSY_S = 5.0  # how long a statement waits for another process's transaction
# Words in the errors of SQLite that pass when another process lets go of the file, or when the disk has room again. Python 3.10
# gives no error codes.
PASSING = ("locked", "is full", "unable to open", "disk I/O error")


def passes(error: sqlite3.OperationalError) -> bool:
    """Return whether a later try may succeed."""
    return any(words in str(error) for words in PASSING)


class SqliteDatabase:
    """Implements tables.Database over one connection."""

    strings: ClassVar[str] = "SELECT value FROM json_each(?)"

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.execute: Callable[..., Rows] = connection.execute
        self.close = connection.close

    @classmethod
    def opened(cls, path: Path) -> Self:
        """Open a file to write, or make it.

        Raises:
            HomeMismatch: The file is no such database, or a newer version of fedserver wrote it.
        """
        connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            migrate(connection, path)
        except sqlite3.OperationalError:
            connection.close()
            raise
        except sqlite3.DatabaseError as error:
            connection.close()
            raise damage(path, str(error)) from None
        return cls(connection)

    @contextmanager
    def synced(self) -> Iterator[None]:
        self.connection.execute("PRAGMA synchronous = FULL")
        try:
            yield
        finally:
            self.connection.execute("PRAGMA synchronous = NORMAL")

    @contextmanager
    def transaction(self, kind: str = "IMMEDIATE") -> Iterator[None]:
        self.connection.execute(f"BEGIN {kind}")
        try:
            yield
        except BaseException:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            raise
        self.connection.execute("COMMIT")

    def moment(self) -> AbstractContextManager[None]:
        return self.transaction("DEFERRED")

    def settle(self) -> None:
        """Move the log into the file: from then on a damaged log cannot lose enrolments.

        If somebody reads just now, the log is left as it is.
        """
        self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


class SqliteReader:
    """Implements ports.ledger.LedgerReader. It opens the file when it is first read, and updates an older schema."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._guard: sqlite3.Connection | None = None  # of a damaged file; see `close`

    @cached_property
    def _db(self) -> SqliteDatabase:
        db = _connected(self._path, "rw", BUSY_S)
        check_schema(db, self._path)
        if version_of(db, self._path) != VERSION:
            SqliteDatabase.opened(self._path).close()
        db.execute("PRAGMA query_only = 1")
        return SqliteDatabase(db)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            if not passes(error):
                raise damage(self._path, str(error)) from None
            raise LedgerBusy(f"the database of the federation cannot be read now ({error})") from error
        except (UnicodeError, sqlite3.DatabaseError, msgspec.MsgspecError) as error:
            raise damage(self._path, str(error)) from None

    def snapshot(self, since: int = 0) -> Snapshot:
        with self._errors(), self._db.moment():
            return snapshot_in(self._db, since)

    def audit(self) -> Iterator[tuple[AuditEntry, str]]:
        return entries(self._path.with_name(AUDIT_FILE))

    def check(self) -> None:
        self._guard = _connected(self._path, "ro", BUSY_S)
        with self._errors():
            faults = [row[0] for row in self._guard.execute("PRAGMA integrity_check(3)")]
            if faults != ["ok"]:
                raise damage(self._path, "; ".join(faults))
            if changed := list(islice(row_digests.changed(self._db.connection), 3)):
                raise damage(self._path, "; ".join(changed))
            self.snapshot()
        self._guard.close()

    def was_served(self) -> bool:
        with self._errors():
            return self._db.execute("SELECT 1 FROM certificates WHERE role = 'operator'").fetchone() is not None

    def close(self) -> None:
        """Close the file.

        SQLite folds the write-ahead log into the file when its last connection closes, unless that one is read-only. The log of
        a damaged file belongs to the file that a backup brings back. So `_guard` goes last: it stays open after a check that
        has found damage.
        """
        if "_db" in self.__dict__:
            self._db.close()
        if self._guard is not None:
            self._guard.close()


def _connected(path: Path, mode: str, timeout_s: float) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, timeout=timeout_s, isolation_level=None, check_same_thread=False)


class SqliteLedger(TableLedger):
    """Implements ports.ledger.Ledger: calls are carried out one after the other.

    Raises:
        HomeMismatch: The file is no such database, or a newer version of fedserver wrote it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(Tables(SqliteDatabase.opened(path)))
        self._certificates = SqliteDatabase(_connected(path, "ro", 0))
        self._audit = Audit(path.with_name(AUDIT_FILE))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            if passes(error):
                raise LedgerBusy(f"the database of the federation cannot be used now ({error})") from error
            raise

    async def close(self) -> None:
        self._certificates.close()
        await super().close()

    async def note(self, event: str, by: str, **facts: Any) -> None:
        head = await asyncio.to_thread(self._audit.write, event, by, **facts)
        await self._do(self._tables.follow_audit, head)

    async def certificate(self, fingerprint: str) -> Certificate | None:
        try:
            return certificate_in(self._certificates, fingerprint)
        except sqlite3.OperationalError:  # another process recovers the file, or holds all of it
            return await self._do(self._tables.certificate, fingerprint)
