"""The ledger in one SQLite file with the audit log beside it, and its reader for views.

`SqliteLedger` works on a thread of its own, so that the event loop never waits for a disk or for a lock. Every call of a peer
asks for its certificate. That is read through a connection of its own, because a reader needs no lock in SQLite's WAL mode: the
answer does not queue behind a commit that is being synced.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from attune.common.errors import LedgerBusy
from attune.common.plan import Plan
from attune.fedserver.core.messages import Record
from attune.fedserver.core.records import DeviceRecord, Report, Slot
from attune.fedserver.ports.ledger import AuditEntry, Certificate, Refusal, Snapshot, Token
from attune.fedserver.stores.audit import Audit, entries
from attune.fedserver.stores.tables import BUSY_S, VERSION, Tables, certificate_in, damage, snapshot_in

T = TypeVar("T")
AUDIT_FILE = "audit.jsonl"
# What SQLite says of errors that pass when another process lets go of the file, or when the disk has room again. Python 3.10
# tells no codes.
PASSING = ("locked", "is full", "unable to open", "disk I/O error")


def passes(error: sqlite3.OperationalError) -> bool:
    """Return whether a later try may succeed."""
    return any(words in str(error) for words in PASSING)


class SqliteReader:
    """Implements ports.ledger.LedgerReader. It opens the file when it is first read, and updates an older schema."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._guard: sqlite3.Connection | None = None  # of a damaged file; see `close`

    def __repr__(self) -> str:
        return f"SqliteReader({self._path})"

    @cached_property
    def _db(self) -> sqlite3.Connection:
        db = _connected(self._path, "rw", BUSY_S)
        if db.execute("PRAGMA user_version").fetchone()[0] != VERSION:
            Tables(self._path).close()
        db.execute("PRAGMA query_only = 1")
        return db

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise LedgerBusy(f"the database of the federation cannot be read now ({error})") from error
        except (sqlite3.DatabaseError, msgspec.MsgspecError) as error:
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
            faults = [row[0] for row in self._guard.execute("PRAGMA quick_check(3)")]
            if faults != ["ok"]:
                raise damage(self._path, "; ".join(faults))
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

    def __repr__(self) -> str:
        return f"SqliteLedger({self._path})"

    async def _do(self, work: Callable[..., T], *arguments: Any) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)
        except sqlite3.OperationalError as error:
            if passes(error):
                raise LedgerBusy(f"the database of the federation cannot be used now ({error})") from error
            raise

    async def close(self) -> None:
        self._certificates.close()
        await self._do(self._tables.close)
        self._thread.shutdown()

    async def note(self, event: str, by: str, **facts: Any) -> None:
        await asyncio.to_thread(self._audit.write, event, by, **facts)

    async def snapshot(self) -> Snapshot:
        return await self._do(self._tables.snapshot)

    async def set_overrides(self, overrides: Mapping[str, Any]) -> None:
        await self._do(self._tables.set_overrides, overrides)

    async def put_record(self, record: Record) -> None:
        await self._do(self._tables.put_record, record)

    async def commit_round(
        self,
        record: Record,
        slots: Iterable[Slot],
        rows: Iterable[Report],
        marks: Mapping[str, Mapping[str, int]],
        plan: Plan | None = None,
    ) -> None:
        await self._do(self._tables.commit_round, record, slots, rows, marks, plan)

    async def last_evaluations(self, before: int, but: int = 0) -> list[Report]:
        return await self._do(self._tables.last_evaluations, before, but)

    async def begin_run(self, name: str, overrides: Mapping[str, Any]) -> None:
        await self._do(self._tables.begin_run, name, overrides)

    async def end_run(self, record: Record, overrides: Mapping[str, Any]) -> None:
        await self._do(self._tables.end_run, record, overrides)

    async def end_cleanup(self) -> None:
        await self._do(self._tables.end_cleanup)

    async def device(self, name: str) -> DeviceRecord | None:
        return await self._do(self._tables.device, name)

    async def devices(self, names: Collection[str] | None = None) -> list[DeviceRecord]:
        return await self._do(self._tables.devices, names)

    async def update_device(self, name: str, **fields: Any) -> None:
        await self._do(self._tables.update_device, name, fields)

    async def refuse(self, refusal: Refusal, keep: int) -> None:
        await self._do(self._tables.refuse, refusal, keep)

    async def disconnect_all(self, now: float) -> None:
        await self._do(self._tables.disconnect_all, now)

    async def enrol(self, name: str, public_key: str, certificate: Certificate, now: float, token: str | None = None) -> None:
        await self._do(self._tables.enrol, name, public_key, certificate, now, token)

    async def renew(self, certificate: Certificate, now: float, unused: int, forget_s: float) -> None:
        await self._do(self._tables.renew, certificate, now, unused, forget_s)

    async def first_use(self, fingerprint: str, now: float, retires_at: float) -> list[str]:
        return await self._do(self._tables.first_use, fingerprint, now, retires_at)

    async def certificates(self, name: str | None = None) -> list[Certificate]:
        return await self._do(self._tables.certificates, name)

    async def certificate(self, fingerprint: str) -> Certificate | None:
        try:
            return certificate_in(self._certificates, fingerprint)
        except sqlite3.OperationalError:  # another process recovers the file, or holds all of it
            return await self._do(self._tables.certificate, fingerprint)

    async def replace_operator(self, certificate: Certificate) -> None:
        await self._do(self._tables.replace_operator, certificate)

    async def add_token(self, token: Token, keep: int | None = None) -> None:
        await self._do(self._tables.add_token, token, keep)

    async def token(self, fingerprint: str) -> Token | None:
        return await self._do(self._tables.token, fingerprint)

    async def tokens(self) -> list[Token]:
        return await self._do(self._tables.tokens)

    async def withdraw(self, id: str, now: float) -> None:
        await self._do(self._tables.withdraw, id, now)

    async def bootstrap_roots(self, now: float, keep_s: float) -> list[bytes]:
        return await self._do(self._tables.bootstrap_roots, now, keep_s)
