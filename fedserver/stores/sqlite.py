"""The ledger in one SQLite file with the audit log beside it, and its reader for views.

`SqliteLedger` works on a thread of its own, so that the event loop never waits for a disk or for a lock. Every call of a peer
asks for its certificate. That is read through a connection of its own, because a reader needs no lock in SQLite's WAL mode: the
answer does not queue behind a commit that is being synced.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial, wraps
from itertools import islice
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from attune.common.errors import LedgerBusy
from attune.fedserver.ports.ledger import AuditEntry, Certificate, Snapshot
from attune.fedserver.stores import row_digests
from attune.fedserver.stores.audit import Audit, entries
from attune.fedserver.stores.migrations import VERSION, check_schema, damage, version_of
from attune.fedserver.stores.tables import BUSY_S, Tables, certificate_in, snapshot_in

T = TypeVar("T")
P = ParamSpec("P")
AUDIT_FILE = "audit.jsonl"
# Words in the errors of SQLite that pass when another process lets go of the file, or when the disk has room again. Python 3.10
# gives no error codes.
PASSING = ("locked", "is full", "unable to open", "disk I/O error")


def passes(error: sqlite3.OperationalError) -> bool:
    """Return whether a later try may succeed."""
    return any(words in str(error) for words in PASSING)


class SqliteReader:
    """Implements ports.ledger.LedgerReader. It opens the file when it is first read, and updates an older schema."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._guard: sqlite3.Connection | None = None  # of a damaged file; see `close`

    @cached_property
    def _db(self) -> sqlite3.Connection:
        db = _connected(self._path, "rw", BUSY_S)
        check_schema(db, self._path)
        if version_of(db, self._path) != VERSION:
            Tables(self._path).close()
        db.execute("PRAGMA query_only = 1")
        return db

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
        with self._errors():
            self._db.execute("BEGIN DEFERRED")
            try:
                return snapshot_in(self._db, since)
            finally:
                self._db.execute("ROLLBACK")

    def audit(self) -> Iterator[tuple[AuditEntry, str]]:
        return entries(self._path.with_name(AUDIT_FILE))

    def check(self) -> None:
        self._guard = _connected(self._path, "ro", BUSY_S)
        with self._errors():
            faults = [row[0] for row in self._guard.execute("PRAGMA integrity_check(3)")]
            if faults != ["ok"]:
                raise damage(self._path, "; ".join(faults))
            if changed := list(islice(row_digests.changed(self._db), 3)):
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
    db = sqlite3.connect(uri, uri=True, timeout=timeout_s, isolation_level=None, check_same_thread=False)
    db.row_factory = sqlite3.Row
    return db


def _awaited(method: Callable[Concatenate[Tables, P], T]) -> Callable[Concatenate[SqliteLedger, P], Coroutine[Any, Any, T]]:
    """Return a method of SqliteLedger that calls this method of its tables on the ledger's thread."""

    @wraps(method)
    async def call(self: SqliteLedger, /, *arguments: P.args, **named: P.kwargs) -> T:
        return await self._do(getattr(self._tables, method.__name__), *arguments, **named)

    return call


class SqliteLedger:
    """Implements ports.ledger.Ledger: calls are carried out one after the other.

    Raises:
        HomeMismatch: The file is no such database, or a newer version of fedserver wrote it.
    """

    def __init__(self, path: Path) -> None:
        self._tables = Tables(path)
        self._certificates = _connected(path, "ro", 0)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._path, self._audit = path, Audit(path.with_name(AUDIT_FILE))

    async def _do(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *arguments, **named))
        except sqlite3.OperationalError as error:
            if passes(error):
                raise LedgerBusy(f"the database of the federation cannot be used now ({error})") from error
            raise

    async def close(self) -> None:
        self._certificates.close()
        await self._do(self._tables.close)
        self._thread.shutdown()

    async def note(self, event: str, by: str, **facts: Any) -> None:
        head = await asyncio.to_thread(self._audit.write, event, by, **facts)
        await self._do(self._tables.follow_audit, head)

    async def certificate(self, fingerprint: str) -> Certificate | None:
        try:
            return certificate_in(self._certificates, fingerprint)
        except sqlite3.OperationalError:  # another process recovers the file, or holds all of it
            return await self._do(self._tables.certificate, fingerprint)

    snapshot = _awaited(Tables.snapshot)
    set_audit_head = _awaited(Tables.set_audit_head)
    set_overrides = _awaited(Tables.set_overrides)
    put_record = _awaited(Tables.put_record)
    commit_round = _awaited(Tables.commit_round)
    last_evaluations = _awaited(Tables.last_evaluations)
    begin_run = _awaited(Tables.begin_run)
    end_run = _awaited(Tables.end_run)
    end_cleanup = _awaited(Tables.end_cleanup)
    device = _awaited(Tables.device)
    devices = _awaited(Tables.devices)
    update_device = _awaited(Tables.update_device)
    refuse = _awaited(Tables.refuse)
    disconnect_all = _awaited(Tables.disconnect_all)
    enrol = _awaited(Tables.enrol)
    release = _awaited(Tables.release)
    renew = _awaited(Tables.renew)
    first_use = _awaited(Tables.first_use)
    certificates = _awaited(Tables.certificates)
    replace_operator = _awaited(Tables.replace_operator)
    add_token = _awaited(Tables.add_token)
    token = _awaited(Tables.token)
    tokens = _awaited(Tables.tokens)
    withdraw = _awaited(Tables.withdraw)
    bootstrap_roots = _awaited(Tables.bootstrap_roots)
