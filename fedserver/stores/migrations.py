"""The schema of the database, and how one of an earlier version becomes one of this version."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from functools import cache
from pathlib import Path

from attune.common.errors import HomeMismatch
from attune.common.text import clean
from attune.fedserver.stores import row_digests

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
