"""The ledger's file, read again and again beside the process that writes it: read only, with a connection of its own."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec

from attune.common.errors import HomeMismatch, LedgerBusy
from attune.fedserver.ports.ledger import Look
from attune.fedserver.stores.tables import BUSY_S, snapshot_in


class SqliteReader:
    """Implements ports.ledger.Reader. A reader needs no lock in SQLite's WAL mode, so it holds nobody up."""

    def __init__(self, path: Path) -> None:
        self._path = path
        uri = f"{path.absolute().as_uri()}?mode=ro"
        self._db = sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        self._db.row_factory = sqlite3.Row

    def __repr__(self) -> str:
        return f"SqliteReader({self._path})"

    def close(self) -> None:
        self._db.close()

    def look(self, since: int) -> Look:
        try:
            self._db.execute("BEGIN DEFERRED")
            try:
                expires = self._db.execute("SELECT name, MAX(not_after) FROM certificates WHERE role = 'device' GROUP BY name")
                return Look(snapshot_in(self._db, since), dict(expires.fetchall()))
            finally:
                self._db.execute("ROLLBACK")
        except sqlite3.OperationalError as error:
            raise LedgerBusy(f"the database of the federation cannot be read now ({error})") from error
        except (sqlite3.DatabaseError, msgspec.MsgspecError) as error:
            raise HomeMismatch(f"{self._path} is damaged ({' '.join(str(error).split())}): restore it from a backup") from None
