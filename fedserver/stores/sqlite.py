"""The ledger in one SQLite file with the audit log beside it, its reader for views, and how an earlier schema becomes this one.

Every call of a peer asks for its certificate. That is read through a connection of its own, because a reader needs no lock in
SQLite's WAL mode: the answer does not queue behind a commit that is being synced.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from typing_extensions import Self

from attune.common.errors import HomeMismatch, LedgerBusy
from attune.common.text import clean
from attune.fedserver.ports.ledger import AuditEntry, Certificate, Snapshot
from attune.fedserver.stores import row_digests
from attune.fedserver.stores.audit import Audit, entries
from attune.fedserver.stores.database import Rows
from attune.fedserver.stores.table_ledger import TableLedger
from attune.fedserver.stores.tables import Tables, certificate_in, snapshot_in

VERSION = 3  # of the schema; since 3 each row has a digest (fedserver.stores.row_digests)
SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS devices (
    name TEXT PRIMARY KEY, public_key TEXT NOT NULL, enrolled_at REAL NOT NULL, founder INTEGER NOT NULL,
    revoked INTEGER NOT NULL DEFAULT 0, connected INTEGER NOT NULL DEFAULT 0, since REAL NOT NULL DEFAULT 0, samples INTEGER,
    contributed INTEGER NOT NULL DEFAULT 0, fetched INTEGER NOT NULL DEFAULT -1, progress REAL NOT NULL DEFAULT 0,
    note TEXT NOT NULL DEFAULT '', labels TEXT NOT NULL DEFAULT '', token TEXT NOT NULL DEFAULT '');
CREATE TABLE IF NOT EXISTS certificates (
    fingerprint TEXT PRIMARY KEY, name TEXT NOT NULL, role TEXT NOT NULL, not_after REAL NOT NULL,
    public_key TEXT NOT NULL DEFAULT '', issued_at REAL NOT NULL DEFAULT 0, used_at REAL, retires_at REAL);
CREATE TABLE IF NOT EXISTS tokens (
    fingerprint TEXT PRIMARY KEY, bootstrap_pem BLOB NOT NULL, uses_left INTEGER NOT NULL, expires_at REAL NOT NULL,
    origin TEXT NOT NULL, used_up_at REAL, id TEXT NOT NULL DEFAULT '', uses INTEGER NOT NULL DEFAULT 1,
    made_at REAL NOT NULL DEFAULT 0, only_for TEXT NOT NULL DEFAULT '', withdrawn_at REAL);
CREATE TABLE IF NOT EXISTS refusals (
    who TEXT NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL, at REAL NOT NULL, count INTEGER NOT NULL,
    PRIMARY KEY (who, kind));
CREATE TABLE IF NOT EXISTS slots (
    part TEXT NOT NULL, key TEXT NOT NULL, file TEXT NOT NULL, digest TEXT NOT NULL, size INTEGER NOT NULL,
    PRIMARY KEY (part, key));
CREATE TABLE IF NOT EXISTS metrics (
    round INTEGER NOT NULL, work TEXT NOT NULL, client TEXT NOT NULL, row BLOB NOT NULL, PRIMARY KEY (round, work, client));
"""
# What version 2 has in the tables of version 1. Certificates of version 1 count as used, since their use was not recorded.
FROM_1 = """
ALTER TABLE devices ADD COLUMN token TEXT NOT NULL DEFAULT '';
ALTER TABLE certificates ADD COLUMN public_key TEXT NOT NULL DEFAULT '';
ALTER TABLE certificates ADD COLUMN issued_at REAL NOT NULL DEFAULT 0;
ALTER TABLE certificates ADD COLUMN used_at REAL;
ALTER TABLE certificates ADD COLUMN retires_at REAL;
UPDATE certificates SET used_at = 0;
ALTER TABLE tokens ADD COLUMN id TEXT NOT NULL DEFAULT '';
ALTER TABLE tokens ADD COLUMN uses INTEGER NOT NULL DEFAULT 1;
ALTER TABLE tokens ADD COLUMN made_at REAL NOT NULL DEFAULT 0;
ALTER TABLE tokens ADD COLUMN only_for TEXT NOT NULL DEFAULT '';
ALTER TABLE tokens ADD COLUMN withdrawn_at REAL;
UPDATE tokens SET uses = MAX(uses_left, 1), id = SUBSTR(fingerprint, 1, 16);
"""


def damage(path: Path, what: str) -> HomeMismatch:
    """Return the error for a database that cannot be what it was; `what`: how that shows."""
    return HomeMismatch(f"{path} is damaged ({' '.join(what.split())}): restore it from a backup, or use a new --home")


@cache
def _expected() -> dict[str, dict[str, str]]:
    """Return the type of each column that this version may have, by the table."""
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(SCHEMA)
        row_digests.add(db)
        tables = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {table: {row[1]: row[2] for row in db.execute(f"PRAGMA table_info({table})")} for table in tables}


def check_schema(db: sqlite3.Connection, path: Path) -> None:
    """Check that a file has no triggers, views and indexes, and no tables and columns that no version has.

    Such a thing is not made by fedserver. A trigger, a constraint or a computed column would act at each change.

    Raises:
        HomeMismatch: It has one; the error names it. Or a newer version of fedserver wrote it.
    """
    complete = version_of(db, path) == VERSION
    rows = db.execute("SELECT type, name, sql, rootpage FROM main.sqlite_master").fetchall()
    for kind, name, sql, page in rows:
        if kind == "index" and sql is None:
            continue  # SQLite's own, of a primary key
        known = _expected().get(name, {}) if kind == "table" and page else {}
        # A computed column is hidden; constraints beside keys are in no version
        columns = {row[1]: row[2] for row in db.execute(f"PRAGMA main.table_xinfo({name})") if not row[6]} if known else {}
        computed = any(word in str(sql).upper() for word in ("CHECK", "GENERATED", " AS "))
        fits = columns == known if complete else columns.items() <= known.items()
        if not known or computed or not fits:
            raise damage(path, f"{clean(str(kind))} {clean(str(name))} is none of fedserver's")


def migrate(db: sqlite3.Connection, path: Path) -> None:
    """Bring the database to this version of the schema, and let the connection keep the digests of its rows.

    Raises:
        HomeMismatch: A newer version of fedserver wrote it, or it has what no version has.
    """
    check_schema(db, path)
    if version_of(db, path) < VERSION:
        db.execute("BEGIN IMMEDIATE")
        try:
            _raise_version(db, version_of(db, path))
        except BaseException:
            db.execute("ROLLBACK")
            raise
        db.execute("COMMIT")
    row_digests.keep(db)


def _raise_version(db: sqlite3.Connection, version: int) -> None:
    older = FROM_1 if version == 1 else ""
    if version < VERSION:  # another process may have done it meanwhile
        for statement in (older + SCHEMA).split(";"):
            db.execute(statement)
        row_digests.add(db)
        db.execute(f"PRAGMA user_version = {VERSION}")


def version_of(db: sqlite3.Connection, path: Path) -> int:
    """Return the version of a database's schema; 0 for a new one.

    Raises:
        HomeMismatch: A newer version of fedserver wrote it.
    """
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    if version > VERSION:
        raise HomeMismatch(
            f"{path} was written by a newer version of fedserver (schema {version}; this one knows {VERSION}): update fedserver"
        )
    return version


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


class MemoryDatabase(SqliteDatabase):
    """Tables in memory, where nothing needs to be synced. Digests of rows are for files."""

    def __init__(self) -> None:
        super().__init__(sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False))
        self.connection.executescript(f"PRAGMA temp_store = MEMORY; {SCHEMA}")  # large sorts write no file either

    @contextmanager
    def synced(self) -> Iterator[None]:
        yield


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
