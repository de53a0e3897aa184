"""The federation's SQLite database: settings, devices, certificates, tokens, the round's record, slots and metrics.

The server writes on a change of state only; commands (`status`, `token`, `revoke`, `export`) read and write it beside a running
server. Ordinary writes survive a killed process; `commit_round` also survives a power cut (synchronous = FULL).
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from attune.common.plan import Plan
from attune.fedserver.core.messages import Record
from attune.fedserver.core.records import Device, Row, Slot

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS devices (
    name TEXT PRIMARY KEY, public_key TEXT NOT NULL, enrolled_at REAL NOT NULL, revoked INTEGER NOT NULL DEFAULT 0,
    connected INTEGER NOT NULL DEFAULT 0, since REAL NOT NULL DEFAULT 0, samples INTEGER,
    contributed INTEGER NOT NULL DEFAULT 0, fetched INTEGER NOT NULL DEFAULT -1, progress REAL NOT NULL DEFAULT 0,
    note TEXT NOT NULL DEFAULT '', labels TEXT NOT NULL DEFAULT '');
CREATE TABLE IF NOT EXISTS certificates (
    fingerprint TEXT PRIMARY KEY, name TEXT NOT NULL, role TEXT NOT NULL, not_after REAL NOT NULL);
CREATE TABLE IF NOT EXISTS tokens (
    fingerprint TEXT PRIMARY KEY, bootstrap_pem BLOB NOT NULL, uses_left INTEGER NOT NULL, expires_at REAL NOT NULL,
    origin TEXT NOT NULL, used_up_at REAL);
CREATE TABLE IF NOT EXISTS slots (
    part TEXT NOT NULL, key TEXT NOT NULL, file TEXT NOT NULL, digest TEXT NOT NULL, size INTEGER NOT NULL,
    PRIMARY KEY (part, key));
CREATE TABLE IF NOT EXISTS metrics (
    round INTEGER NOT NULL, work TEXT NOT NULL, client TEXT NOT NULL, row BLOB NOT NULL, PRIMARY KEY (round, work, client));
"""


class Store:
    """One connection, used from one thread. Errors of SQLite pass through; `open_database` maps a missing home."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, timeout=10, isolation_level=None, check_same_thread=False)
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.executescript(SCHEMA)

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    # --- meta: JSON values

    def get(self, key: str) -> Any:
        """The JSON value under `key`, or None."""
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return msgspec.json.decode(row[0]) if row else None

    def put(self, key: str, value: Any) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, msgspec.json.encode(value)))

    def record(self) -> Record:
        value = self.get("record")
        return msgspec.convert(value, Record) if value else Record()

    # --- devices and certificates

    def device(self, name: str) -> Device | None:
        row = self._db.execute("SELECT * FROM devices WHERE name = ?", (name,)).fetchone()
        return msgspec.convert(dict(row), Device, strict=False) if row else None

    def devices(self) -> list[Device]:
        rows = self._db.execute("SELECT * FROM devices ORDER BY name")
        return [msgspec.convert(dict(row), Device, strict=False) for row in rows]

    def add_device(self, name: str, public_key: str) -> None:
        self._db.execute(
            "INSERT INTO devices (name, public_key, enrolled_at) VALUES (?, ?, ?) "
            "ON CONFLICT (name) DO UPDATE SET public_key = excluded.public_key",
            (name, public_key, time.time()),
        )

    def update_device(self, name: str, **columns: Any) -> None:
        assignments = ", ".join(f"{column} = ?" for column in columns)
        self._db.execute(f"UPDATE devices SET {assignments} WHERE name = ?", (*columns.values(), name))  # noqa: S608

    def disconnect_all(self) -> None:
        """At start: a new process has no streams."""
        self._db.execute("UPDATE devices SET connected = 0, since = ? WHERE connected", (time.time(),))

    def add_certificate(self, fingerprint: str, name: str, role: str, not_after: float) -> None:
        self._db.execute("INSERT OR REPLACE INTO certificates VALUES (?, ?, ?, ?)", (fingerprint, name, role, not_after))

    def replace_operator(self, fingerprint: str, not_after: float) -> None:
        with self.transaction():
            self._db.execute("DELETE FROM certificates WHERE role = 'operator'")
            self.add_certificate(fingerprint, "operator", "operator", not_after)

    def certificate(self, fingerprint: str) -> sqlite3.Row | None:
        """name, role, not_after and revoked of a certificate that this server issued, or None."""
        row: sqlite3.Row | None = self._db.execute(
            "SELECT c.name, c.role, c.not_after, COALESCE(d.revoked, 0) AS revoked FROM certificates c "
            "LEFT JOIN devices d ON d.name = c.name AND c.role = 'device' WHERE c.fingerprint = ?",
            (fingerprint,),
        ).fetchone()
        return row

    # --- tokens

    def add_token(
        self, fingerprint: str, bootstrap_pem: bytes, uses: int, expires_at: float, origin: str, keep: int | None
    ) -> None:
        """Adds one; with `keep`, only so many of this origin stay, the newest."""
        with self.transaction():
            self._db.execute(
                "INSERT INTO tokens VALUES (?, ?, ?, ?, ?, NULL)", (fingerprint, bootstrap_pem, uses, expires_at, origin)
            )
            if keep is not None:
                self._db.execute(
                    "DELETE FROM tokens WHERE origin = ? AND rowid NOT IN "
                    "(SELECT rowid FROM tokens WHERE origin = ? ORDER BY rowid DESC LIMIT ?)",
                    (origin, origin, keep),
                )

    def token(self, fingerprint: str) -> sqlite3.Row | None:
        row: sqlite3.Row | None = self._db.execute("SELECT * FROM tokens WHERE fingerprint = ?", (fingerprint,)).fetchone()
        return row

    def use_token(self, fingerprint: str) -> None:
        self._db.execute(
            "UPDATE tokens SET uses_left = uses_left - 1, used_up_at = CASE WHEN uses_left <= 1 THEN ? END "
            "WHERE fingerprint = ?",
            (time.time(), fingerprint),
        )

    def bootstrap_roots(self, now: float, keep_s: float) -> list[bytes]:
        """Bootstrap certificates to admit to the handshake; spent ones for `keep_s` longer, so that they hear the reason."""
        rows = self._db.execute(
            "SELECT bootstrap_pem FROM tokens WHERE MIN(expires_at, COALESCE(used_up_at, expires_at)) > ? ORDER BY fingerprint",
            (now - keep_s,),
        )
        return [row[0] for row in rows]

    # --- rounds

    def slots(self) -> list[Slot]:
        return [Slot(*row) for row in self._db.execute("SELECT part, key, file, digest, size FROM slots ORDER BY part, key")]

    def commit_round(
        self,
        record: Record,
        slots: Iterable[Slot],
        rows: Iterable[Row],
        marks: Mapping[str, Mapping[str, int]],
        plan: Plan | None = None,
    ) -> None:
        """The one commit point of a round: record, state, metrics and the devices' `marks` become true together, durably."""
        self._db.execute("PRAGMA synchronous = FULL")
        with self.transaction():
            self.put("record", record)
            if plan is not None:
                self.put("plan", plan)
            for name, columns in marks.items():
                self.update_device(name, **columns)
            self._db.executemany(
                "INSERT OR REPLACE INTO slots VALUES (?, ?, ?, ?, ?)", [msgspec.structs.astuple(s) for s in slots]
            )
            self._db.executemany(
                "INSERT OR REPLACE INTO metrics VALUES (?, ?, ?, ?)",
                [(row.round, row.work, row.client, msgspec.json.encode(row)) for row in rows],
            )
        self._db.execute("PRAGMA synchronous = NORMAL")

    def rows(self) -> list[Row]:
        """In the order of time: the rounds, in each training before evaluation, in each the clients by name."""
        found = self._db.execute("SELECT row FROM metrics ORDER BY round, work DESC, client")
        return [msgspec.json.decode(row[0], type=Row) for row in found]
