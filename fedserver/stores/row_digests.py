"""A digest in each row of the database, so that a changed byte is noticed.

SQLite has no checksums within its file. Each table has the column `row_digest`: a digest of the row's other columns. Triggers
of the connection itself write it at each change, so that no statement can forget it. A row that was changed by hand, or by a
fault of the disk, has another digest than its content.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator
from typing import Any

COLUMN = "row_digest"
DIGEST_BYTES = 16
SCHEMA_KEY = "schema digest"  # of the table meta
SHOWN = 60  # characters of a row's key in a message


def digest_of(*values: Any) -> bytes:
    """Return the digest of a row's values, each with its type and length."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for value in values:
        data = value if isinstance(value, bytes) else repr(value).encode("utf-8", "surrogatepass")
        digest.update(f"{type(value).__name__} {len(data)} ".encode())
        digest.update(data)
    return digest.digest()


def _tables(db: sqlite3.Connection) -> Iterator[tuple[str, list[str]]]:
    """Yield each table with its columns, without that of the digest."""
    names = db.execute("SELECT name FROM main.sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY name")
    for [table] in names.fetchall():
        columns = [row[1] for row in db.execute(f"PRAGMA main.table_info({table})")]
        yield table, [column for column in columns if column != COLUMN]


def keep(db: sqlite3.Connection) -> None:
    """Let this connection write the digest of each row that it changes from now on."""
    db.create_function(COLUMN, -1, digest_of, deterministic=True)
    for table, columns in list(_tables(db)):
        values = ", ".join(f"NEW.{column}" for column in columns)
        write = f"UPDATE {table} SET {COLUMN} = {COLUMN}({values}) WHERE rowid = NEW.rowid"  # noqa: S608 - names of the schema
        for event in ("INSERT", f"UPDATE OF {', '.join(columns)}"):
            name = f"{table}_{event[:6].lower()}"
            db.execute(f"CREATE TEMP TRIGGER {name} AFTER {event} ON main.{table} BEGIN {write}; END")


def add(db: sqlite3.Connection) -> None:
    """Add the column to the tables of an older schema, and the digests of all rows, within the present transaction."""
    db.create_function(COLUMN, -1, digest_of, deterministic=True)
    for table, _ in list(_tables(db)):
        db.execute(f"ALTER TABLE {table} ADD COLUMN {COLUMN} BLOB")
    db.execute("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", (SCHEMA_KEY, _schema_digest(db)))
    for table, columns in list(_tables(db)):
        db.execute(f"UPDATE {table} SET {COLUMN} = {COLUMN}({', '.join(columns)})")  # noqa: S608 - names of the schema


def changed(db: sqlite3.Connection) -> Iterator[str]:
    """Yield the table and the key of each row that has other content than was written."""
    row = db.execute("SELECT value FROM meta WHERE key = ?", (SCHEMA_KEY,)).fetchone()
    if row is None or row[0] != _schema_digest(db):
        yield "the schema"
    for table, columns in list(_tables(db)):
        for *values, digest in db.execute(f"SELECT {', '.join(columns)}, {COLUMN} FROM {table}"):  # noqa: S608
            if digest != digest_of(*values):
                yield f"a row of {table}, {str(values[0])[:SHOWN]!r}"


def _schema_digest(db: sqlite3.Connection) -> bytes:
    rows = db.execute("SELECT type, name, tbl_name, sql FROM main.sqlite_master ORDER BY type, name").fetchall()
    return digest_of(*(value for row in rows for value in row))
